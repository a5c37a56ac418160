"""What the documentation of clients shows is what the API takes; the examples run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool, json_format
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from slipway.security.rules import RULES
from slipway_protos.v1 import artifact_pb2, export_pb2

ROOT = Path(__file__).parents[2]
CALLS = re.findall(r"-d '(\{.*\})' coordinator:7070 (\S+)/(\w+)", (ROOT / "docs" / "clients.md").read_text())
assert all((artifact_pb2, export_pb2, health_pb2))  # their descriptors are looked up by name


@pytest.mark.parametrize("name", ["slipway.v1.ExportService", "slipway.v1.ArtifactService"])
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
    done = example("mlflow_register.py", str(tmp_path), "--name", "x")
    assert (done.returncode, done.stdout) == (6, "")
    assert "pip install mlflow" in done.stderr


MLFLOW = """
import contextlib, json, types
calls = []
@contextlib.contextmanager
def start_run(**given):
    yield types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    print(json.dumps(calls))
def note(name):
    return lambda *given, **named: calls.append([name, *given, named])
set_tags, log_metrics, log_artifacts, log_artifact = map(note, ["set_tags", "log_metrics", "log_artifacts", "log_artifact"])
def register_model(*given, **named):
    calls.append(["register_model", *given, named])
    return types.SimpleNamespace(version=7)
"""


def test_a_result_is_registered_with_its_report(tmp_path: Path) -> None:
    """Against a stand-in with MLflow's own functions, as MLflow is no dependency of Slipway."""
    (tmp_path / "mlflow.py").write_text(MLFLOW)
    figures = {"digest": "sha256:d", "status": "passed", "mean_kl": 0.01, "size_bytes": 5}
    result = {"success": True, "export_id": "e1", "error_message": "", "formats": {"onnx-int8": figures}}
    (tmp_path / "report.json").write_text(json.dumps({"result": result, "lineage": {"sources": {"base": "sha256:b"}}}))
    done = example("mlflow_register.py", str(tmp_path), "--name", "m", "--format", "onnx-int8", path=tmp_path)
    assert done.stdout.splitlines()[-1] == "m version 7", done.stderr
    calls = {call[0]: call[1:] for call in json.loads(done.stdout.splitlines()[0])}
    assert calls["log_metrics"][0] == {"mean_kl": 0.01, "size_bytes": 5.0}
    assert calls["set_tags"][0]["slipway.source.base"] == "sha256:b"
    assert calls["register_model"][0] == "runs:/r1/onnx-int8"
    done = example("mlflow_register.py", str(tmp_path), "--name", "m", "--format", "none", path=tmp_path)
    assert (done.returncode, "it has onnx-int8" in done.stderr) == (3, True)


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


def example(name: str, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(path)} if path else {}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *words], env=environment, capture_output=True, text=True
    )
