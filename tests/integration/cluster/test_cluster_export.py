"""The command a user types, against a cluster: what it delivers is what it delivers alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli import slipway
from cluster import Cluster
from cluster_audit import audit_results
from postgres_server import PostgresServer
from s3_server import S3Server
from tiny_models import make_base, make_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# Engines and measured times differ from run to run.
DETERMINISTIC = ("pytorch", "pytorch-int8", "onnx", "onnx-int8")


def checksums(folder: Path) -> dict[str, str]:
    """Digest of every file of the deterministic formats."""
    (manifest,) = folder.rglob("MANIFEST.sha256")
    lines = [line.split("  ", 1) for line in manifest.read_text().splitlines()]
    return {path: digest for digest, path in lines if path.split("/")[0] in DETERMINISTIC}


def test_the_cluster_delivers_the_same_bytes_as_one_process(
    tmp_path: Path, postgres: PostgresServer, s3: S3Server
) -> None:
    base = make_base(tmp_path / "base")
    make_checkpoint(base, tmp_path / "run")
    arguments = ["export", "--checkpoint", tmp_path / "run", "--base-model", base, "--json"]
    arguments += ["--set", "optimization.quantization=int8", "--set", "validation.test_samples=2"]
    arguments += ["--set", "validation.benchmark_performance=false"]
    alone = slipway(*arguments, "--out", tmp_path / "alone", home=tmp_path / "home", timeout=280)
    assert alone.json["paths"], alone.err[-3000:]
    folder = tmp_path / "cluster"
    folder.mkdir()
    with Cluster(folder, postgres, s3, tiny=False, lease_seconds=20) as cluster:
        environment = cluster.environment("command")
        home = Path(environment.pop("SLIPWAY_HOME"))
        together = slipway(
            *arguments, "--out", tmp_path / "together", "--coordinator", cluster.service.address,
            home=home, timeout=400, **environment,
        )  # fmt: skip
        assert together.json["paths"].keys() == alone.json["paths"].keys(), together.err[-3000:] + cluster.logs()
        assert together.code == alone.code
        (export,) = cluster.client.list_exports()
        audit_results(cluster, export.name, {})
        used = {attempt.worker for task in export.tasks for attempt in task.attempts}
    assert {path.split("/")[0] for path in checksums(tmp_path / "alone")} == set(DETERMINISTIC)
    assert checksums(tmp_path / "together") == checksums(tmp_path / "alone")
    assert len(used) > 1, "independent branches run on several workers"
