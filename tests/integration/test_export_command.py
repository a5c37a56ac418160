"""``slipway export`` around the stages: one trace, the same folder again, lost artifacts, folders that are taken."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from support.commands.cli import Done, slipway
from support.models import tiny_models


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


def export(project: Path, *more: str | Path, **environment: str) -> Done:
    """The merge alone, for speed."""
    only_merge = ("--set", "formats.onnx.enabled=false", "--set", "validation.enabled=false")
    where = ("--base-model", project / "base", "--checkpoint", project / "run")
    return slipway("export", "--json", *where, *only_merge, *more, home=project / "home", **environment)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans it is sent, by name."""

    def __init__(self) -> None:
        self.spans: dict[str, object] = {}

    def Export(  # noqa: N802 - the service's own name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    kept = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.mark.slow
def test_export_and_stage_are_one_trace(project: Path, tmp_path: Path, collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    done = export(project, "--out", tmp_path, SLIPWAY_TRACING="otlp", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    assert done.code == 0, done.err
    root, stage = kept.spans["export"], kept.spans["stage merge"]
    assert stage.trace_id == root.trace_id
    assert stage.parent_span_id != b""
    assert root.parent_span_id == b""


@pytest.mark.slow
def test_the_same_command_finds_its_folder_again(project: Path, tmp_path: Path) -> None:
    """Without any work; with its artifacts collected, it is made again."""
    first = export(project, "--out", tmp_path)
    [state] = (project / "home" / "exports").glob(f"{first.json['export_id']}/state.db")
    before = state.stat().st_mtime_ns
    again = export(project, "--out", tmp_path)
    assert (first.code, again.code) == (0, 0), again.err
    assert state.stat().st_mtime_ns == before, "a coordinator was started for an export that has succeeded"
    assert again.json["output_directory"] == first.json["output_directory"]
    assert len(list(tmp_path.iterdir())) == 1
    assert slipway("verify", first.json["output_directory"], home=project / "home").code == 0

    assert slipway("cache", "gc", "--older-than", "0s", home=project / "home").code == 0
    again = export(project, "--out", tmp_path)
    assert again.code == 0, again.err
    assert again.json["formats"]["pytorch"]["digest"] == first.json["formats"]["pytorch"]["digest"]
    assert any(not attempt["reused"] for attempt in again.json["attempts"])


def test_a_folder_that_is_taken_is_left_alone(project: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "precious").touch()
    done = export(project, "--out", tmp_path, "--set", "output.naming_pattern=models")
    assert (done.code, done.json["reason"]) == (3, "OUTPUT_EXISTS")
    assert [path.name for path in tmp_path.rglob("*")] == ["models", "precious"]
