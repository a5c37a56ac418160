"""Clients that break the rules: each is refused with the status that says why, and the server goes on for the others."""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import pytest
from google.protobuf import descriptor_pool
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipway.security.access.principals import new_token
from slipway_protos.v1 import configuration_pb2, worker_pb2
from slipway_protos.v1 import export_pb2 as pb
from support.coordinators.guarded_servers import PUSHED, ROLES, SERVED, SERVICE, SOURCES, Code, Servers, create
from support.coordinators.harness import CONFIGURATION
from support.coordinators.random_messages import messages
from support.hostile.texts import DECEPTIVE


def pb_configuration(**sections: Any) -> configuration_pb2.ExportConfiguration:
    return configuration_pb2.ExportConfiguration(**sections)


@pytest.mark.parametrize(
    "request_",
    [
        create(labels={f"label-{n}": "x" for n in range(65)}),
        create(labels={"x" * 300: "x"}),
        create(labels={"x": "y" * 5000}),
        create(export_id="x" * 300),
        create(sources={f"source-{n}": PUSHED for n in range(65)}),
        create(labels={f"label-{n}": "x" * 4000 for n in range(300)}),
    ],
    ids=["labels", "label-name", "label-value", "id", "sources", "bytes"],
)
def test_requests_over_a_limit_are_refused(servers: Servers, request_: pb.CreateExportRequest) -> None:
    assert servers.as_("submitter", "CreateExport", create()) is Code.OK
    assert servers.as_("submitter", "CreateExport", request_) is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x02\xc3\x28", b"\x12"])
def test_malformed_protobuf_is_an_invalid_argument_and_only_for_those_let_in(servers: Servers, data: bytes) -> None:
    for method in ("CreateExport", "GetExport", "WatchExport"):
        assert servers.call(SERVICE + method, data, token=servers.tokens["submitter"]) is Code.INVALID_ARGUMENT
        assert servers.call(SERVICE + method, data, token=new_token()) is Code.UNAUTHENTICATED


def test_forged_page_tokens_and_sizes(servers: Servers) -> None:
    for token in ("x", "LTE=", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk=", "e30=", "é"):
        request = pb.ListExportsRequest(parent="projects/red", page_token=token)
        assert servers.as_("viewer", "ListExports", request) is Code.INVALID_ARGUMENT
    assert servers.as_("viewer", "ListExports", pb.ListExportsRequest(parent="projects/red", page_size=-1)) is (
        Code.INVALID_ARGUMENT
    )
    most = pb.ListExportsRequest(parent="projects/red", page_size=2**31 - 1)
    assert servers.as_("viewer", "ListExports", most) is Code.OK


@pytest.mark.parametrize("last", ['"\\ud800"', '"\\u0000"', "7", "[" * 10_000, "null"])
def test_page_tokens_of_the_right_form_with_the_wrong_content(servers: Servers, last: str) -> None:
    token = base64.urlsafe_b64encode(f'[1.5, {last}, ""]'.encode()).decode()
    request = pb.ListExportsRequest(parent="projects/red", page_token=token[:256])
    assert servers.as_("viewer", "ListExports", request) is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "text", [text for text in DECEPTIVE if text.isascii() or text.encode(errors="ignore").decode() == text]
)
def test_nobody_gives_an_export_a_name_that_others_terminals_obey(servers: Servers, text: str) -> None:
    for request in (
        create(labels={"model_name": text}),
        create(labels={text: "x"}),
        create(sources=SOURCES | {text: PUSHED}),
        create(source_formats={text: "gptq"}),
        create(source_formats={"base": text}),
        create(configuration=pb_configuration(checkpoint={"path": text})),
        create(configuration=pb_configuration(output={"naming_pattern": text})),
    ):
        assert servers.as_("submitter", "CreateExport", request) is Code.INVALID_ARGUMENT
    report = worker_pb2.SynchronizeRequest(worker_id="w", stages=[text])
    method = "/slipway.v1.WorkerService/Synchronize"
    assert servers.call(method, report.SerializeToString(), token=servers.tokens["worker"]) is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("attempt", ["²", "9" * 5000, "-1", ""])
def test_a_workers_attempt_is_a_number(servers: Servers, attempt: str) -> None:
    done = worker_pb2.CompleteTaskRequest(
        worker_id="w", task=f"projects/red/exports/ours:merge:{attempt}", lease_epoch=1
    )
    done.cancelled.SetInParent()
    report = worker_pb2.SynchronizeRequest(
        worker_id="w", stages=["none"], running=[worker_pb2.RunningTask(task=done.task)]
    )
    for method, request in (("CompleteTask", done), ("Synchronize", report)):
        path = f"/slipway.v1.WorkerService/{method}"
        assert servers.call(path, request.SerializeToString(), token=servers.tokens["worker"]) is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("pages", [500, pytest.param(10_000, marks=pytest.mark.cluster)])
def test_many_list_pages_in_a_row(servers: Servers, pages: int) -> None:
    with servers.client("submitter") as client:
        for number in range(49):
            client.create_export(CONFIGURATION, sources=SOURCES, export_id=f"page-{number}")
        names: list[str] = []
        while len(names) < pages:
            names.extend(export.name for export in client.list_exports(page_size=1))
    assert len(set(names)) >= 50
    assert all(names.count(name) == names.count(names[0]) for name in set(names))


def _methods() -> list[tuple[str, str, Any]]:
    pool = descriptor_pool.Default()
    return [
        (server, f"/{service}/{method.name}", method.input_type)
        for server, services in SERVED.items()
        for service in services
        for method in pool.FindServiceByName(service).methods
    ]


CALLS = st.sampled_from(_methods()).flatmap(
    lambda found: st.tuples(
        st.just(found[:2]),
        st.one_of(messages(found[2]).map(lambda message: message.SerializeToString()), st.binary(max_size=200)),
        st.sampled_from([*ROLES, "", "unknown"]),
    )
)
ANSWERS = {
    Code.OK,
    Code.INVALID_ARGUMENT,
    Code.NOT_FOUND,
    Code.ALREADY_EXISTS,
    Code.FAILED_PRECONDITION,
    Code.ABORTED,
    Code.PERMISSION_DENIED,
    Code.UNAUTHENTICATED,
    Code.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED,  # of calls that wait for something to happen
}


@pytest.mark.parametrize("cases", [100, pytest.param(2000, marks=pytest.mark.cluster)])
def test_any_call_of_any_rpc_is_answered_in_order(servers: Servers, cases: int) -> None:
    seen: Counter[Code] = Counter()

    @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=CALLS)
    def call(case: Any) -> None:
        (server, method), data, name = case
        token = servers.tokens.get(name, new_token() if name else "")
        seconds = 0.5 if name in ROLES else 60  # some wait for something to happen, which are not for unknown people
        code = servers.call(method, data, token=token, server=server, seconds=seconds)
        seen[code] += 1
        assert code in ANSWERS
        if "health" not in method:
            assert (code is Code.UNAUTHENTICATED) == (name in {"", "unknown"})

    call()
    print(dict(seen.most_common()))
    assert seen.total() >= cases * 0.9
    assert len(seen) >= 5
    assert servers.healthy()
