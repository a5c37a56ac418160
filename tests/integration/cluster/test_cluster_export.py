"""The command a user types, against a cluster: what it delivers is what it delivers alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.cluster.audit import audit_results
from support.cluster.cluster import Cluster
from support.commands.cli import Done, slipway
from support.models.engine_plans import assert_same_plan
from support.servers.postgres_server import PostgresServer
from support.servers.s3_server import S3Server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

# They say when and how fast it was.
OF_THIS_RUN = {"README.md", "lineage.json", "report.html", "report.json", "report.junit.xml"}
# No two builds of an engine have the same bytes, not even in one process: the tensorrt_build service's README says why.
ENGINE, ENGINE_DESCRIPTION = "tensorrt/model.sm89.engine", "tensorrt/engine.json"


@dataclass(frozen=True)
class Delivered:
    """What an export delivered.

    Attributes:
        formats: Status, size and, but for the engine, digest by format.
        files: Digest by path, of those that are not about one run.
        engine: The engine's description without its digest.
        plan: Bytes of the engine.
    """

    formats: dict[str, tuple[str, int, str]]
    files: dict[str, str]
    engine: dict[str, Any]
    plan: bytes


def delivered(done: Done, *, logs: str = "") -> Delivered:
    """Read what a command delivered."""
    assert done.code == 0, done.err[-3000:] + logs
    folder = Path(done.json["output_directory"])
    lines = [line.split("  ", 1) for line in (folder / "MANIFEST.sha256").read_text().splitlines()]
    files = {path: digest for digest, path in lines}
    for path in (*OF_THIS_RUN, ENGINE, ENGINE_DESCRIPTION):
        files.pop(path)
    description = json.loads((folder / ENGINE_DESCRIPTION).read_text())
    for engine in description["engines"]:
        engine.pop("sha256")
    formats = {
        name: (found["status"], found["size_bytes"], "" if name == "tensorrt" else found["digest"])
        for name, found in done.json["formats"].items()
    }
    return Delivered(formats, files, description, (folder / ENGINE).read_bytes())


def test_the_cluster_delivers_the_same_bytes_as_one_process(
    tmp_path: Path, sample: Path, postgres: PostgresServer, s3: S3Server
) -> None:
    """The demo, with everything its own configuration asks for."""
    arguments = ["export", "-c", sample / "export.yaml", "--json"]
    alone = delivered(slipway(*arguments, "--out", tmp_path / "alone", home=tmp_path / "home", timeout=800))
    folder = tmp_path / "cluster"
    folder.mkdir()
    with Cluster(folder, postgres, s3, tiny=False, lease_seconds=20) as cluster:
        environment = cluster.environment("command")
        home = Path(environment.pop("SLIPWAY_HOME"))
        arguments += ["--coordinator", cluster.service.address]
        done = slipway(*arguments, "--out", tmp_path / "together", home=home, timeout=800, **environment)
        together = delivered(done, logs=cluster.logs())
        (export,) = cluster.client.list_exports()
        audit_results(cluster, export.name, {})
        used = {attempt.worker for task in export.tasks for attempt in task.attempts}
        assert not any(attempt.reused for task in export.tasks for attempt in task.attempts)
    assert together.formats.keys() == {"pytorch", "pytorch-int4", "onnx", "onnx-int8", "onnx-int4", "tensorrt"}
    assert together.formats == alone.formats
    assert len(together.files) > 40
    assert together.files == alone.files
    assert together.engine == alone.engine
    assert_same_plan(together.plan, alone.plan)
    assert len(used) > 1, "independent branches run on several workers"
