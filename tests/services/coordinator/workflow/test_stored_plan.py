"""The plan made after an import of sources is stored: a restart with other formats installed keeps it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slipway.configuration import parse
from slipway.rpc.values import struct_of
from slipway.sources.addresses import Allowed
from slipway_coordinator.lifecycle import importing
from slipway_protos.v1 import worker_pb2
from support.coordinators.harness import Harness, states, wait_for
from support.coordinators.liar import Liar

SOURCES = {"checkpoint": {"path": "s3://training/run"}, "base_model": {"name": "hf://org/tiny"}}
FACTS = {"urls": {"base": "hf://org/tiny@0123", "adapter": "s3://training/run/checkpoint-3"}}
DIGESTS = {"base": "sha256:" + "a" * 64, "adapter": "sha256:" + "b" * 64}
PLANNED = {"import", "merge", "reference", "validate"}


def coordinator(home: Path) -> Harness:
    return Harness(home, with_worker=False, options={"import_from": Allowed.parse("s3://training hf://org")})


def test_a_restart_keeps_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse({**SOURCES, "formats": {"onnx": {"enabled": False}}})
    with coordinator(tmp_path) as first, closing(Liar(first.address)) as worker:
        name = first.client.create_export(settings, sources={}).name
        output = worker_pb2.TaskOutput(outputs=DIGESTS, facts=struct_of(FACTS))
        assert worker.bring(worker.lease("import"), output=output) == ""
        wait_for(lambda: set(states(first.client.get_export(name))) == PLANNED)

    def planned_by_others(*given: Any, **options: Any) -> Any:
        return plan(*given, **options)[:1]

    plan = importing.plan
    monkeypatch.setattr(importing, "plan", planned_by_others)  # as if other formats were installed by now
    with coordinator(tmp_path) as second, closing(Liar(second.address)) as worker:
        output = worker_pb2.TaskOutput(outputs={"pytorch": DIGESTS["base"]})
        assert worker.bring(worker.lease("merge"), output=output) == ""
        wait_for(lambda: states(second.client.get_export(name)).get("merge") == "succeeded")
        assert set(states(second.client.get_export(name))) == PLANNED
