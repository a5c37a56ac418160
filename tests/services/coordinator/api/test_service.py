"""The public API: what it refuses and how, names, pages, idempotency; by the real client over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from slipway.client import Client
from slipway.configuration import ExportConfiguration, parse
from slipway.errors import ModelExportError
from slipway.rpc.messages import configuration_message
from slipway_protos.v1 import export_pb2, export_pb2_grpc, worker_pb2, worker_pb2_grpc
from support.coordinators.harness import DIGEST, Harness, state, wait_for

SOURCES = {"base": DIGEST, "adapter": DIGEST}
DEFAULTS = ExportConfiguration()


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    # No worker: exports stay where they are put.
    with Harness(tmp_path_factory.mktemp("service"), with_worker=False) as running:
        yield running


@pytest.fixture
def client(harness: Harness) -> Client:
    return harness.client


def reason(client: Client, call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ModelExportError) as caught:
        call(*arguments, **named)
    assert caught.value.remedy or caught.value.about
    return caught.value.reason


def test_the_same_request_again_answers_with_the_same_export(client: Client) -> None:
    first = client.create_export(DEFAULTS, sources=SOURCES, export_id="twice", labels={"model_name": "m"})
    second = client.create_export(DEFAULTS, sources=SOURCES, export_id="twice", labels={"model_name": "m"})
    assert first.name == second.name == "projects/default/exports/twice"
    assert first.create_time == second.create_time
    assert first.labels["model_name"] == "m"


def test_where_a_client_publishes_makes_no_other_request(client: Client) -> None:
    first = client.create_export(DEFAULTS, sources=SOURCES, export_id="published")
    elsewhere = parse({"output": {"destinations": ["oci://host/name:v1"], "license": "MIT"}})
    again = client.create_export(elsewhere, sources=SOURCES, export_id="published")
    assert again.create_time == first.create_time
    assert not again.configuration.output.destinations, "what the first request said is recorded"
    recorded = client.create_export(elsewhere, sources=SOURCES, export_id="recorded").configuration.output
    assert (list(recorded.destinations), recorded.license) == (["oci://host/name:v1"], "MIT")
    named = parse({"output": {"directory": "elsewhere", "destinations": ["mlflow:a"]}})
    assert reason(client, client.create_export, named, sources=SOURCES, export_id="published") == "EXPORT_EXISTS"


def test_another_request_of_the_same_id_is_refused(client: Client) -> None:
    client.create_export(DEFAULTS, sources=SOURCES, export_id="taken")
    other = parse({"optimization": {"quantization": "int8"}})
    assert reason(client, client.create_export, other, sources=SOURCES, export_id="taken") == "EXPORT_EXISTS"
    changed = {**SOURCES, "heldout": DIGEST}
    assert reason(client, client.create_export, DEFAULTS, sources=changed, export_id="taken") == "EXPORT_EXISTS"


def test_a_plan_can_be_had_without_an_export(client: Client) -> None:
    export = client.create_export(DEFAULTS, sources=SOURCES, export_id="planned", validate_only=True)
    assert [task.id for task in export.tasks] == ["merge", "onnx_export", "reference", "validate"]
    assert reason(client, client.get_export, "planned") == "EXPORT_NOT_FOUND"


@pytest.mark.parametrize(
    "wrong",
    [
        {"export_id": "Upper"},
        {"export_id": "a/b"},
        {"export_id": "a" * 64},
        {"project": "no spaces"},
        {"sources": {"adapter": DIGEST}},
        {"sources": {}},
        {"sources": {"base": "sha256:short", "adapter": DIGEST}},
    ],
)
def test_malformed_requests_are_refused(client: Client, wrong: dict[str, Any]) -> None:
    assert reason(client, client.create_export, DEFAULTS, **{"sources": SOURCES, **wrong}) == "REQUEST_INVALID"


def test_a_base_alone_is_exported_as_it_is(client: Client) -> None:
    export = client.create_export(DEFAULTS, sources={"base": DIGEST}, export_id="plain", validate_only=True)
    assert [task.id for task in export.tasks] == ["prepare", "onnx_export", "reference", "validate"]
    assert sorted(export.tasks[-1].inputs) == ["base", "onnx", "pytorch", "reference"]


@pytest.mark.parametrize("part", ["", "configuration", "configuration.optimization", "configuration.formats"])
def test_a_setting_of_a_newer_client_is_refused_and_not_left_out(harness: Harness, part: str) -> None:
    request = export_pb2.CreateExportRequest(
        parent="projects/default", sources=SOURCES, configuration=configuration_message(DEFAULTS), validate_only=True
    )
    message = request
    for name in filter(None, part.split(".")):
        message = getattr(message, name)
    message = message["onnx"] if part.endswith("formats") else message
    message.MergeFromString(b"\xc0\x3e\x01")  # field 1000 is true
    with grpc.insecure_channel(harness.address) as channel, pytest.raises(grpc.RpcError) as caught:
        export_pb2_grpc.ExportServiceStub(channel).CreateExport(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    where = ".".join(filter(None, ("CreateExportRequest", part)))
    assert f"{where} has a field that this coordinator does not know (number 1000)" in caught.value.details()


def test_a_configuration_that_cannot_be_honoured_is_refused_with_all_problems(harness: Harness) -> None:
    message = configuration_message(DEFAULTS)
    message.optimization.group_size = 33
    message.recovery.profile = "bold"
    request = export_pb2.CreateExportRequest(parent="projects/default", configuration=message, sources=SOURCES)
    with pytest.raises(ModelExportError, match="group_size") as caught:
        harness.client._calls.call(harness.client._calls.exports.CreateExport, request)
    assert caught.value.reason == "CONFIGURATION_INVALID"
    assert "bold" in str(caught.value)


def test_unknown_exports_are_not_found(client: Client) -> None:
    for call in (client.get_export, client.cancel_export, client.retry_export):
        assert reason(client, call, "nobody") == "EXPORT_NOT_FOUND"
    assert reason(client, lambda: list(client.watch_export("nobody"))) == "EXPORT_NOT_FOUND"
    assert reason(client, client.get_export, "projects/a/b") == "REQUEST_INVALID"


def test_calls_an_exports_state_does_not_allow(client: Client) -> None:
    client.create_export(DEFAULTS, sources=SOURCES, export_id="queued")
    assert reason(client, client.retry_export, "queued") == "EXPORT_STATE"
    assert reason(client, client.delete_export, "queued") == "EXPORT_STATE"


def test_repeated_calls_succeed_and_change_nothing(client: Client) -> None:
    client.create_export(DEFAULTS, sources=SOURCES, export_id="again")
    assert [state(client.cancel_export("again")) for _ in range(2)] == ["cancelled"] * 2
    etag = client.retry_export("again").etag
    assert client.retry_export("again", etag=etag).name.endswith("/again")
    client.cancel_export("again")
    for _ in range(2):
        client.delete_export("again")
    assert reason(client, client.get_export, "again") == "EXPORT_NOT_FOUND"


def test_what_nobody_runs_yet_is_cancelled_at_once_and_can_be_deleted(client: Client) -> None:
    client.create_export(DEFAULTS, sources=SOURCES, export_id="gone")
    assert state(client.cancel_export("gone")) == "cancelled"
    client.delete_export("gone")
    assert reason(client, client.get_export, "gone") == "EXPORT_NOT_FOUND"
    again = client.create_export(parse({"validation": {"enabled": False}}), sources=SOURCES, export_id="gone")
    assert len(again.tasks) == 2


def test_lists_come_in_pages_newest_first(harness: Harness) -> None:
    client = harness.client
    names = [client.create_export(DEFAULTS, sources=SOURCES, project="pages").name for _ in range(5)]
    assert [export.name for export in client.list_exports(project="pages")] == names[::-1]
    stub = client._calls.exports
    seen: list[str] = []
    token = ""
    for expected in (2, 2, 1):
        page = stub.ListExports(export_pb2.ListExportsRequest(parent="projects/pages", page_size=2, page_token=token))
        assert len(page.exports) == expected
        seen += [export.name for export in page.exports]
        token = page.next_page_token
    assert (seen, token) == (names[::-1], "")
    wrong = export_pb2.ListExportsRequest(parent="projects/pages", page_token="?")
    assert reason(client, client._calls.call, stub.ListExports, wrong) == "REQUEST_INVALID"


def test_the_trace_of_a_request_is_the_exports(harness: Harness) -> None:
    request = export_pb2.CreateExportRequest(parent="projects/default", sources=SOURCES)
    traceparent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    export = harness.client._calls.exports.CreateExport(request, metadata=(("traceparent", traceparent),))
    assert export.trace_id == "ab" * 16
    with grpc.insecure_channel(harness.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        report = worker_pb2.SynchronizeRequest(worker_id="t", stages=["merge"], free_slots=100)
        wait_for(lambda: "ab" * 16 in [lease.traceparent[3:35] for lease in stub.Synchronize(report).leases])


def test_malformed_worker_calls_are_refused(harness: Harness) -> None:
    with grpc.insecure_channel(harness.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        for call, request in (
            (stub.Synchronize, worker_pb2.SynchronizeRequest(stages=["merge"])),
            (stub.Synchronize, worker_pb2.SynchronizeRequest(worker_id="w")),
            (stub.CompleteTask, worker_pb2.CompleteTaskRequest(worker_id="w", task="odd")),
            (stub.CompleteTask, worker_pb2.CompleteTaskRequest(worker_id="w", task="projects/d/exports/x:m:1")),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(request)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_health_and_reflection(harness: Harness) -> None:
    with grpc.insecure_channel(harness.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "slipway.v1.ExportService", "slipway.v1.WorkerService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        assert "slipway.v1.ExportService" in [service.name for service in listed.list_services_response.service]


def test_a_coordinator_that_is_not_there_is_unavailable() -> None:
    with Client("127.0.0.1:9", timeout_seconds=5) as nobody:
        assert reason(nobody, nobody.get_export, "x") == "COORDINATOR_UNAVAILABLE"
        assert reason(nobody, lambda: list(nobody.watch_export("x"))) == "COORDINATOR_UNAVAILABLE"
