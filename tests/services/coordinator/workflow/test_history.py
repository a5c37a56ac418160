"""Requests that are repeated, lists that are filtered and paged, etags, a full queue, and forgetting; over the wire."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from slipway.client import Client
from slipway.client.calls import create_request
from slipway.configuration import ExportConfiguration, parse
from slipway.errors import ModelExportError
from slipway.rpc.messages import configuration_of
from slipway_coordinator.api.export_service import request_hash
from slipway_coordinator.api.plans import chosen_settings
from slipway_coordinator.lifecycle.records import ExportState
from slipway_coordinator.workflow.periodic import forget_old
from slipway_protos.v1 import export_pb2
from support.coordinators.harness import DIGEST, Harness, state, tiny_export, tiny_task

SOURCES = {"base": DIGEST, "adapter": DIGEST}
DEFAULTS = ExportConfiguration()


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with Harness(tmp_path_factory.mktemp("history"), with_worker=False) as running:
        yield running


@pytest.fixture
def client(harness: Harness) -> Client:
    return harness.client


def reason(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ModelExportError) as caught:
        call(*arguments, **named)
    return caught.value.reason


def test_a_repeated_request_is_known_without_a_name(client: Client) -> None:
    first = client.create_export(DEFAULTS, sources=SOURCES, request_id="r-1", priority=7)
    again = client.create_export(DEFAULTS, sources=SOURCES, request_id="r-1")
    assert again.name == first.name
    assert again.priority == 7
    other = client.create_export(DEFAULTS, sources=SOURCES, request_id="r-1", project="another")
    assert other.name.startswith("projects/another/")


def test_a_repeated_request_is_known_after_a_default_changed() -> None:
    before = parse({"optimization": {"quantization": "int8"}})
    after = before.model_copy(update={"recovery": before.recovery.model_copy(update={"max_attempts": 99})})
    after.model_fields_set.discard("recovery")  # nobody set it: this is what an upgrade gives the same request
    assert after != before
    known = request_hash(chosen_settings(before), SOURCES, {})
    assert request_hash(chosen_settings(after), SOURCES, {}) == known
    asked = create_request(before, sources=SOURCES, labels=None, export_id="", project="default", validate_only=False,
                           request_id="r", priority=0, source_formats=None)  # fmt: skip
    assert not asked.configuration.HasField("recovery")
    assert request_hash(chosen_settings(configuration_of(asked.configuration)), SOURCES, {}) == known


def test_a_request_id_for_something_else_is_refused(client: Client) -> None:
    client.create_export(DEFAULTS, sources=SOURCES, request_id="r-2", export_id="two")
    another = parse({"optimization": {"quantization": "int8"}})
    for wrong in ({"configuration": another}, {"export_id": "three"}, {"sources": {**SOURCES, "heldout": DIGEST}}):
        arguments = {"configuration": DEFAULTS, "sources": SOURCES, "request_id": "r-2", **wrong}
        assert reason(client.create_export, **arguments) == "EXPORT_EXISTS"
    assert reason(client.create_export, DEFAULTS, sources=SOURCES, request_id="a b") == "REQUEST_INVALID"
    assert reason(client.create_export, DEFAULTS, sources=SOURCES, priority=101) == "REQUEST_INVALID"


@pytest.fixture(scope="module")
def listed(harness: Harness) -> list[str]:
    names = []
    for number in range(9):
        labels = {"team": "speech" if number % 2 else 'the "other"', "n": str(number), "a.org/odd": str(number % 2)}
        made = harness.client.create_export(DEFAULTS, sources=SOURCES, project="lists", labels=labels)
        names.append(made.name)
    harness.client.cancel_export(names[0])
    return names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", range(9)),
        ("state = cancelled", [0]),
        ("state!=cancelled", range(1, 9)),
        ("label.team=speech", [1, 3, 5, 7]),
        (r'label.team = "the \"other\"" AND state != cancelled', [2, 4, 6, 8]),
        ("label.absent != x AND label.n=3", [3]),
        ("label.a.org/odd=0 AND state!=cancelled", [2, 4, 6, 8]),
        ("create_time > 2020-01-01T00:00:00Z AND end_time>2020-01-01", [0]),
        ("create_time < 2020-01-01T00:00:00Z", []),
    ],
)
def test_filters(client: Client, listed: list[str], text: str, expected: Any) -> None:
    found = [export.name for export in client.list_exports(project="lists", filter=text, page_size=2)]
    assert found == [listed[number] for number in reversed(expected)]


@pytest.mark.parametrize(
    "text",
    ["state", "state = odd", "state < queued", "state=queued XOR state=failed", "label.=x", "name=x", "create_time > soon",
     'label.a="open', "state=queued AND", " AND ".join(["label.a=b"] * 17), "label.a=b; DROP TABLE slipway_exports"],
)  # fmt: skip
def test_filters_that_are_not_understood(client: Client, text: str) -> None:
    assert reason(lambda: list(client.list_exports(filter=text))) == "REQUEST_INVALID"


def test_nul_is_in_no_filter_and_no_label(client: Client) -> None:
    assert reason(lambda: list(client.list_exports(filter="label.a='\0'"))) == "REQUEST_INVALID"
    for labels in ({"a": "\0"}, {"\0": "a"}):
        assert reason(client.create_export, DEFAULTS, sources=SOURCES, labels=labels) == "REQUEST_INVALID"


def test_labels_are_no_longer_than_what_can_be_stored(client: Client) -> None:
    for labels in ({"n" * 101: ""}, {"ü" * 101: ""}, {"n": "v" * 2049}, {"n": "ü" * 1025}):
        assert reason(client.create_export, DEFAULTS, sources=SOURCES, labels=labels) == "LIMIT_EXCEEDED"


def test_all_projects_can_be_listed(client: Client, listed: list[str]) -> None:
    elsewhere = client.create_export(DEFAULTS, sources=SOURCES, project="elsewhere").name
    everything = {export.name for export in client.list_exports(project="-")}
    assert {elsewhere, *listed} <= everything


def test_pages_stay_whole_while_exports_come_and_go(client: Client) -> None:
    names = [client.create_export(DEFAULTS, sources=SOURCES, project="moving").name for _ in range(6)]
    request = export_pb2.ListExportsRequest(parent="projects/moving", page_size=2)
    first = client._calls.exports.ListExports(request)
    client.cancel_export(names[5])
    client.delete_export(names[5])
    client.create_export(DEFAULTS, sources=SOURCES, project="moving")
    request.page_token = first.next_page_token
    second = client._calls.exports.ListExports(request)
    assert [e.name for e in (*first.exports, *second.exports)] == [names[n] for n in (5, 4, 3, 2)]
    request.filter = "state=queued"
    assert reason(client._calls.call, client._calls.exports.ListExports, request) == "REQUEST_INVALID"
    for token in ("?", "bm9wZQ==", first.next_page_token[:-4]):
        wrong = export_pb2.ListExportsRequest(parent="projects/moving", page_token=token)
        assert reason(client._calls.call, client._calls.exports.ListExports, wrong) == "REQUEST_INVALID"


def test_a_stale_etag_prevents_a_change(client: Client) -> None:
    seen = client.create_export(DEFAULTS, sources=SOURCES, export_id="etags").etag
    cancelled = client.cancel_export("etags")
    assert state(cancelled) == "cancelled"
    assert reason(client.retry_export, "etags", etag=seen) == "ETAG_MISMATCH"
    assert reason(client.delete_export, "etags", etag=seen) == "ETAG_MISMATCH"
    with pytest.raises(grpc.RpcError) as caught:
        client._calls.exports.DeleteExport(export_pb2.DeleteExportRequest(name=cancelled.name, etag=seen))
    assert caught.value.code() == grpc.StatusCode.ABORTED
    client.delete_export("etags", etag=cancelled.etag)


def test_old_exports_are_forgotten_with_their_workflows(harness: Harness) -> None:
    old = tiny_export("ancient", tiny_task("m")).with_(state=ExportState.FAILED, end_time=time.time() - 40 * 86_400)
    new = tiny_export("recent", tiny_task("m")).with_(state=ExportState.FAILED, end_time=time.time() - 86_400)
    for record in (old, new):
        assert harness.run(lambda record=record: harness.server.coordinator.call(
            lambda: harness.server.coordinator.database.insert(record)))  # fmt: skip
    assert harness.run(lambda: forget_old(harness.server.coordinator, days=30)) == 1
    assert reason(harness.client.get_export, "ancient") == "EXPORT_NOT_FOUND"
    assert state(harness.client.get_export("recent")) == "failed"
