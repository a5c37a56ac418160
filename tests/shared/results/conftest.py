"""A finished export, and a store that holds its outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipway.artifacts import LocalStore
from slipway.errors import Failure
from slipway.rpc.values import status_of, struct_of
from slipway_protos.v1 import export_pb2 as pb


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def put(store: LocalStore, tmp_path: Path, name: str, *, size: int = 3 << 20) -> str:
    folder = tmp_path / "made" / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(name.encode() * (size // len(name)))
    (folder / "config.json").write_text(json.dumps({"name": name}))
    return store.put(folder)


@pytest.fixture
def export(store: LocalStore, tmp_path: Path) -> pb.Export:
    """Return a finished export of two formats; the second was quantized at the second attempt."""
    merged, small = put(store, tmp_path, "pytorch"), put(store, tmp_path, "pytorch-int4", size=1 << 20)
    export = pb.Export(
        name="projects/default/exports/e-1",
        state=pb.EXPORT_STATE_SUCCEEDED,
        sources={"base": f"sha256:{'a' * 64}", "adapter": f"sha256:{'b' * 64}"},
        outputs={"pytorch": merged, "pytorch-int4": small},
        labels={"model_name": "run", "checkpoint": "checkpoint-10"},
    )
    export.create_time.FromJsonString("2026-01-02T03:04:05Z")
    first = pb.Attempt(number=1, state=pb.TASK_STATE_FAILED, params=struct_of({"group_size": 64}))
    first.error.CopyFrom(status_of(Failure("OUT_OF_MEMORY", "too large", "use less", "StageError")))
    second = pb.Attempt(number=2, state=pb.TASK_STATE_SUCCEEDED, params=struct_of({"group_size": 32}), rule="smaller")
    export.tasks.add(
        id="merge",
        stage="merge",
        format="pytorch",
        state=pb.TASK_STATE_SUCCEEDED,
        inputs={"base": "source:base", "adapter": "source:adapter"},
        outputs={"pytorch": merged},
        facts=struct_of({"warnings": ["the change of 1 module is lost in rounding"]}),
    )
    export.tasks.add(
        id="quantize-pytorch-int4",
        stage="quantize",
        format="pytorch-int4",
        state=pb.TASK_STATE_SUCCEEDED,
        inputs={"model": "task:merge/pytorch"},
        outputs={"model": small},
        attempts=[first, second],
    )
    return export
