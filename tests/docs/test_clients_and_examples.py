"""What the documentation of clients shows is what the API takes; the examples run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool, json_format
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from slipway.security.access.rules import RULES
from slipway_protos.v1 import artifact_pb2, coordinator_pb2, export_pb2
from support.coordinators.harness import Harness, tiny_export, tiny_task
from support.models.tiny_models import make_base, make_checkpoint

ROOT = Path(__file__).parents[2]
CALLS = re.findall(r"-d '(\{.*\})' coordinator:7070 (\S+)/(\w+)", (ROOT / "docs" / "clients.md").read_text())
assert all((artifact_pb2, coordinator_pb2, export_pb2, health_pb2))  # their descriptors are looked up by name


@pytest.mark.parametrize(
    "name", ["slipway.v1.ExportService", "slipway.v1.ArtifactService", "slipway.v1.CoordinatorService"]
)
def test_all_public_calls_are_documented(name: str) -> None:
    service = descriptor_pool.Default().FindServiceByName(name)
    assert {method for _, found, method in CALLS if found == name} == {m.name for m in service.methods}


@pytest.mark.parametrize(("body", "service", "method"), CALLS)
def test_documented_requests_are_messages(body: str, service: str, method: str) -> None:
    found = descriptor_pool.Default().FindServiceByName(service).FindMethodByName(method)
    request = json_format.Parse(body, GetMessageClass(found.input_type)())
    assert request.ByteSize()
    assert f"/{service}/{method}" in RULES


def test_registering_without_mlflow_says_what_is_missing(tmp_path: Path) -> None:
    done = example("-S", "mlflow_register.py", str(tmp_path), "--name", "x")  # without any installed package
    assert (done.returncode, done.stdout) == (6, "")
    assert "pip install mlflow" in done.stderr


@pytest.fixture
def delivered(tmp_path: Path) -> Path:
    """What an export delivers, as far as it is registered."""
    folder = tmp_path / "delivered"
    (folder / "onnx-int8").mkdir(parents=True)
    (folder / "onnx-int8" / "model.onnx").write_bytes(b"a graph")
    figures = {"digest": "sha256:d", "status": "passed", "mean_kl": 0.01, "size_bytes": 5}
    result = {"success": True, "export_id": "e1", "error_message": "", "formats": {"onnx-int8": figures}}
    (folder / "report.json").write_text(json.dumps({"result": result, "lineage": {"sources": {"base": "sha256:b"}}}))
    for name in ("report.html", "lineage.json", "MANIFEST.sha256"):
        (folder / name).write_text(name)
    return folder


@pytest.mark.slow
def test_a_result_is_registered_with_its_report(tmp_path: Path, delivered: Path, monkeypatch: Any) -> None:
    store = mlflow_store(tmp_path)
    words = ("mlflow_register.py", str(delivered), "--name", "it's", "--format", "onnx-int8")
    for _ in range(2):  # a step of a pipeline may be repeated
        done = example(*words, **store)
        assert done.stdout.splitlines()[-1] == "it's version 1", done.stderr
    assert "already registered" in done.stderr
    report = json.loads((delivered / "report.json").read_text())
    report["result"]["formats"]["onnx-int8"]["digest"] = "sha256:another"
    (delivered / "report.json").write_text(json.dumps(report))
    done = example(*words, **store)
    assert done.stdout.splitlines()[-1] == "it's version 2", done.stderr
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    import mlflow

    client = mlflow.MlflowClient()
    assert len(client.search_model_versions()) == 2
    version = client.get_model_version("it's", "1")
    assert version.tags["slipway.source.base"] == "sha256:b"
    run = client.get_run(version.run_id)
    assert run.data.metrics == {"mean_kl": 0.01, "size_bytes": 5.0}
    assert run.data.tags["slipway.validation.findings"] == "passed"
    assert {entry.path for entry in client.list_artifacts(version.run_id)} >= {"report.html", "lineage.json"}
    # Its threads would outlast the test.
    fetch = "import mlflow, sys; mlflow.artifacts.download_artifacts(sys.argv[1], dst_path=sys.argv[2])"
    subprocess.run([sys.executable, "-c", fetch, "models:/it's/1", str(tmp_path / "fetched")], env=store, check=True)
    assert (tmp_path / "fetched" / "model.onnx").read_bytes() == b"a graph"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--name", "m", "--format", "none"], 3, "it has onnx-int8"),
        (["--name", "", "--format", "onnx-int8"], 1, "'name'"),
    ],
)
def test_what_cannot_be_registered_is_said(
    tmp_path: Path, delivered: Path, words: list[str], code: int, said: str
) -> None:
    done = example("mlflow_register.py", str(delivered), *words, **mlflow_store(tmp_path))
    assert (done.returncode, "Traceback" in done.stderr, said in done.stderr) == (code, False, True), done.stderr


def mlflow_store(tmp_path: Path) -> dict[str, str]:
    """Settings of an MLflow that keeps all in a folder, and tells nobody about it."""
    settings = {"MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    return settings | {"MLFLOW_DISABLE_TELEMETRY": "true", "GIT_PYTHON_REFRESH": "quiet"}


def test_the_ci_job_ends_with_the_commands_code_and_keeps_the_report(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.html").write_text("page")
    command = tmp_path / "bin" / "slipway"
    command.parent.mkdir()
    answer = json.dumps({"validation_report_path": str(out / "report.html")})
    command.write_text(f"#!/bin/sh\necho '{answer}'\nexit 4\n")
    command.chmod(0o755)
    script = ROOT / "examples" / "ci_export.sh"
    environment = {"PATH": f"{command.parent}:/usr/bin:/bin:{Path(sys.executable).parent}"}
    done = subprocess.run(
        ["/bin/sh", str(script), "x.yaml", "kept"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 4, done.stderr
    assert "differs" in done.stderr
    assert (tmp_path / "kept" / "report.html").read_text() == "page"


def test_several_exports_are_watched_to_their_ends(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        names = [
            harness.submit(tiny_export("good", tiny_task("m"), base=harness.base())),
            harness.submit(tiny_export("bad", tiny_task("m", fail="INPUT_MISSING"), base=harness.base())),
        ]
        environment = {"SLIPWAY_COORDINATOR": harness.address}
        for watched, code in ((names[:1], 0), (names, 1)):
            done = example("watch_exports.py", *watched, **environment)
            assert done.returncode == code, done.stderr
            assert f"{names[0]}: EXPORT_STATE_SUCCEEDED" in done.stdout
        assert f"{names[1]}: EXPORT_STATE_FAILED" in done.stdout
        done = example("watch_exports.py", "nobody", **environment)
        assert (done.returncode, done.stderr.split(":")[0]) == (3, "EXPORT_NOT_FOUND")
    done = example("watch_exports.py", names[0], **environment)
    assert (done.returncode, done.stderr.split(":")[0]) == (7, "COORDINATOR_UNAVAILABLE")


@pytest.mark.slow
def test_several_runs_are_exported_and_one_that_fails_is_named(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    run = make_checkpoint(tmp_path / "base", tmp_path / "run").parent
    environment = {
        "SLIPWAY_HOME": str(tmp_path / "home"),
        "EXPORT_OUTPUT_DIR": str(tmp_path / "out"),
        "EXPORT_ENABLE_ONNX": "false",
        "EXPORT_ENABLE_VALIDATION": "false",
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ["PYTHONPATH"],
    }
    done = example("export_runs.py", str(run), str(tmp_path / "nowhere"), **environment)
    assert done.returncode == 1, done.stderr
    assert re.match(r"ExportResult e-\w+: succeeded, 1 of 1 format made", done.stdout)
    assert f"{tmp_path}/nowhere: CHECKPOINT_NOT_FOUND: " in done.stderr
    assert "checkpoint-10 of run onto base: merge running" in done.stderr
    assert "Traceback" not in done.stderr
    assert example("export_runs.py", str(run), **environment).returncode == 0


def example(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an example, with flags of the interpreter before its name."""
    command = [str(ROOT / "examples" / word) if word.endswith(".py") else word for word in words]
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
