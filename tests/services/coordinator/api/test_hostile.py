"""What clients and workers send is taken or refused with its reason, in bounded time and memory; nothing of it is INTERNAL."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import struct_pb2
from google.protobuf.json_format import MessageToDict
from google.rpc import error_details_pb2, status_pb2
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slipway.errors import ModelExportError, StageError
from slipway.execution.memory_curve import MemoryOverTime
from slipway.planning.plan import plan
from slipway.rpc.messages import configuration_message
from slipway.rpc.values import failure_of_status, status_of, struct_of
from slipway.stage import MOST_FACTS_BYTES
from slipway.texts import hidden_character
from slipway_coordinator.api.export_service import new_record
from slipway_coordinator.api.worker_service import completion, worker_report
from slipway_coordinator.lifecycle import transitions
from slipway_coordinator.lifecycle.records import TaskRecord
from slipway_coordinator.lifecycle.transitions import Event, EventKind
from slipway_coordinator.storage.filters import page_start, page_token, parse_filter
from slipway_protos.v1 import export_pb2 as pb
from slipway_protos.v1 import worker_pb2
from support.coordinators.harness import CONFIGURATION, DIGEST, Harness, state, states, tiny_export, tiny_task
from support.coordinators.liar import Liar
from support.coordinators.random_messages import messages
from support.hostile.texts import DECEPTIVE, TEXTS, within_bounds

thorough = settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
QUERY = ("projects/default", "")
SOURCES = {"base": DIGEST, "adapter": DIGEST}
SENDABLE = [text for text in DECEPTIVE if text.encode(errors="replace").decode() == text]
REFUSED = {"REQUEST_INVALID", "LIMIT_EXCEEDED", "CONFIGURATION_INVALID"}
MERGE = TaskRecord.from_plan(next(task for task in plan(CONFIGURATION, SOURCES) if task.id == "merge"))

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(TEXTS), st.text()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=3),
    max_leaves=6,
)


@thorough
@given(
    token=st.one_of(
        st.text(), VALUES.map(json.dumps).map(lambda text: base64.urlsafe_b64encode(text.encode()).decode())
    )
)
@example(token=base64.urlsafe_b64encode(b"[" * 50_000).decode())
@example(token=base64.urlsafe_b64encode(b'[1e400, "projects/default/exports/a", ""]').decode())
@example(token=base64.urlsafe_b64encode(("[" + "9" * 5000 + ', "a", ""]').encode()).decode())
def test_any_page_token_is_one_or_refused(token: str) -> None:
    with within_bounds(allowed={"REQUEST_INVALID"}):
        page_start(token, query=QUERY)


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "A", "x" * 301, "", 7, None])
@pytest.mark.parametrize("time", [1.5, "1.5", float("nan"), float("inf"), True, None])
def test_a_page_token_of_the_right_query_is_not_believed_either(time: Any, name: Any) -> None:
    _, _, fingerprint = json.loads(base64.urlsafe_b64decode(page_token((0.0, "a"), query=QUERY)))
    forged = base64.urlsafe_b64encode(json.dumps([time, name, fingerprint]).encode()).decode()
    with pytest.raises(ModelExportError) as raised:
        page_start(forged, query=QUERY)
    assert raised.value.reason == "REQUEST_INVALID"
    assert page_start(page_token((1.5, "sha256:0"), query=QUERY), query=QUERY) == (1.5, "sha256:0")


@thorough
@given(
    field=st.sampled_from(["state=", "label.a=", "create_time<", "end_time>=", "label."]),
    text=st.sampled_from(TEXTS) | st.text(),
)
@example(field="create_time<", text="0001-01-01T00:00:00+23:59")
@example(field="create_time<", text="9999-12-31T23:59:59-23:59")
def test_any_filter_is_understood_or_refused(field: str, text: str) -> None:
    with within_bounds(allowed={"REQUEST_INVALID"}):
        parse_filter(field + text)


@thorough
@given(request=messages(pb.CreateExportRequest.DESCRIPTOR))
def test_any_request_for_an_export_is_planned_or_refused(request: pb.CreateExportRequest) -> None:
    request.parent = "projects/default"
    with within_bounds(allowed=REFUSED):
        new_record(request)
    request.export_id = ""
    request.sources.clear()
    request.sources.update(SOURCES)
    with within_bounds(allowed=REFUSED):
        new_record(request)


def creation(**changes: Any) -> pb.CreateExportRequest:
    fields = {"parent": "projects/default", "configuration": configuration_message(CONFIGURATION), "sources": SOURCES}
    return pb.CreateExportRequest(**(fields | changes))


@pytest.mark.parametrize("text", SENDABLE)
def test_labels_that_are_not_shown_as_they_are_are_refused(text: str) -> None:
    assert new_record(creation(labels={"model_name": "modèle 模型 👩‍👧 می‌خواهم"}))
    for labels in ({"model_name": text}, {text: "x"}):
        with pytest.raises(ModelExportError, match="U\\+") as raised:
            new_record(creation(labels=labels))
        assert raised.value.reason == "REQUEST_INVALID"
        assert hidden_character(str(raised.value)) == ""


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"sources": SOURCES | {"../x": DIGEST}}, "../x"),
        ({"sources": SOURCES | {"adapter-02": DIGEST}}, "adapter-02"),
        ({"sources": SOURCES | {"": DIGEST}}, "sources"),
        ({"source_formats": {"other": "gptq"}}, "other"),
        ({"source_formats": {"heldout": "gptq"}}, "heldout"),
        ({"source_formats": {"base": "../../x"}}, "../../x"),
        ({"source_formats": {"base": "pickle pickle gptq"}}, "pickle"),
    ],
)
def test_sources_that_nothing_takes_are_refused(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelExportError) as raised:
        new_record(creation(**changes))
    assert raised.value.reason == "REQUEST_INVALID"
    assert names in str(raised.value)


def test_sources_that_something_takes_are_taken() -> None:
    assert new_record(creation(sources=SOURCES | {"heldout": DIGEST}))
    for stored_as in ("", "pickle", "gptq", "pickle gptq", "fp8"):
        assert new_record(creation(source_formats={"base": stored_as}))


@thorough
@given(request=messages(worker_pb2.SynchronizeRequest.DESCRIPTOR))
def test_any_report_of_a_worker_is_taken_or_refused(request: worker_pb2.SynchronizeRequest) -> None:
    with within_bounds(allowed=REFUSED):
        report = worker_report("w", request)
        assert report.memory_bytes >= 0
        assert not any(hidden_character(stage) for stage in report.stages)


@thorough
@given(
    request=messages(worker_pb2.CompleteTaskRequest.DESCRIPTOR),
    facts=st.dictionaries(st.sampled_from(["warnings", "targets", "output_bytes", "x"]), VALUES),
)
def test_any_result_of_a_worker_is_an_event_that_can_be_stored_and_shown(
    request: worker_pb2.CompleteTaskRequest, facts: dict[str, Any]
) -> None:
    request.task = "projects/default/exports/a:merge:1"
    for outputs in ({"pytorch": DIGEST}, dict(request.output.outputs)):
        request.output.outputs.clear()
        request.output.outputs.update(outputs)
        request.output.facts.update(MessageToDict(struct_of(facts)))
        with within_bounds(allowed=REFUSED):
            event = completion(request, MERGE)
            assert Event.model_validate_json(event.model_dump_json()) == event
            MessageToDict(struct_of(event.facts))
    failed = worker_pb2.CompleteTaskRequest(task=request.task, error=request.error)
    with within_bounds(allowed=REFUSED):
        event = completion(failed, MERGE)
        assert event.failure is not None
        status_of(event.failure)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with Harness(tmp_path_factory.mktemp("hostile"), with_worker=False) as harness:
        yield harness


@pytest.fixture
def liar(harness: Harness) -> Iterator[Liar]:
    liar = Liar(harness.address)
    yield liar
    liar.close()


def facts(**values: Any) -> struct_pb2.Struct:
    return struct_of(values)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (worker_pb2.TaskOutput(outputs={"model": DIGEST}), "model"),
        (worker_pb2.TaskOutput(outputs={"pytorch": DIGEST, "../x": DIGEST}), "../x"),
        (worker_pb2.TaskOutput(), "pytorch"),
        (worker_pb2.TaskOutput(outputs={"pytorch": "sha256:" + "0" * 63}), "no digest"),
        (worker_pb2.TaskOutput(outputs={"pytorch": "x" * 100_000}), "no digest"),
        (worker_pb2.TaskOutput(outputs={"pytorch": DIGEST}, facts=facts(x="y" * MOST_FACTS_BYTES)), "bytes"),
        (worker_pb2.TaskOutput(outputs={"pytorch": DIGEST}, facts=facts(warnings=7)), "facts.warnings"),
        (worker_pb2.TaskOutput(outputs={"pytorch": DIGEST}, facts=facts(warnings=[{}])), "facts.warnings"),
        (worker_pb2.TaskOutput(outputs={"pytorch": DIGEST}, facts=facts(output_bytes="many")), "facts.output_bytes"),
        (worker_pb2.TaskOutput(outputs={"pytorch": DIGEST}, facts=facts(output_bytes=-1)), "facts.output_bytes"),
    ],
    ids=["name", "more", "none", "no-digest", "long-digest", "size", "warnings", "warning", "bytes", "negative"],
)
def test_what_is_not_the_tasks_result_fails_the_attempt_and_says_so(
    harness: Harness, liar: Liar, output: worker_pb2.TaskOutput, says: str
) -> None:
    once = CONFIGURATION.model_copy(update={"recovery": CONFIGURATION.recovery.model_copy(update={"max_attempts": 1})})
    name = harness.client.create_export(once, sources=SOURCES).name
    lease = liar.lease()
    assert liar.bring(lease, output=output) == "RESULT_INVALID"
    assert liar.bring(lease, output=output) == "RESULT_INVALID", "repeated, it is the same answer"
    ended = harness.finished(name)
    failure = failure_of_status(ended.error)
    assert (state(ended), failure.reason) == ("failed", "RESULT_INVALID")
    assert says in failure.message
    assert len(failure.message) < 1000
    assert states(ended)["merge"] == "failed"


def test_an_errors_reason_and_time_to_wait_may_be_anything(harness: Harness, liar: Liar) -> None:
    once = CONFIGURATION.model_copy(update={"recovery": CONFIGURATION.recovery.model_copy(update={"max_attempts": 1})})
    name = harness.client.create_export(once, sources=SOURCES).name
    status = status_pb2.Status(code=13, message="m" * 1_000_000)
    info = error_details_pb2.ErrorInfo(reason="\x1b[31m", domain="slipway")
    info.metadata.update({"retry_after_seconds": "nan", "problems": "{", **{f"k{n}": "v" for n in range(1000)}})
    status.details.add().Pack(info)
    assert liar.bring(liar.lease(), error=status) == ""
    failure = failure_of_status(harness.finished(name).error)
    assert failure.reason == "INTERNAL"
    assert len(failure.message) <= 20_000
    assert len(failure.about) <= 66


def test_an_error_whose_details_cannot_be_read_ends_the_attempt(harness: Harness, liar: Liar) -> None:
    once = CONFIGURATION.model_copy(update={"recovery": CONFIGURATION.recovery.model_copy(update={"max_attempts": 1})})
    name = harness.client.create_export(once, sources=SOURCES).name
    status = status_pb2.Status(code=13, message="it is full")
    status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff")
    assert liar.bring(liar.lease(), error=status) == ""
    failure = failure_of_status(harness.finished(name).error)
    assert (failure.reason, failure.message) == ("INTERNAL", "it is full")


@pytest.mark.parametrize("attempt", ["²", "٣", "-1", "1" * 5000, "", "1.0", " 1"])
def test_the_number_of_an_attempt_is_digits(harness: Harness, liar: Liar, attempt: str) -> None:
    lease = worker_pb2.TaskLease(task=f"projects/default/exports/a:merge:{attempt}", lease_epoch=1)
    assert liar.bring(lease, output=worker_pb2.TaskOutput(outputs={"pytorch": DIGEST})) == "REQUEST_INVALID"
    assert harness.client.address


def test_an_export_does_not_fail_without_a_word() -> None:
    """Records of before may hold results under other names; what needs them is skipped, and the export says why."""
    record = transitions.begin(tiny_export("x", tiny_task("first"), tiny_task("second", needs=("first",))), now=1.0)
    done = Event(kind=EventKind.SUCCEEDED, time=2.0, task="first", attempt=1, outputs={"other": DIGEST})
    ended = transitions.apply(record, done)
    assert ended.state.value == "failed"
    assert ended.failure is not None
    assert ended.failure.reason == "RESULT_INVALID"
    assert "second" in ended.failure.message


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_memory_over_time_is_kept_only_if_it_can_be_drawn(seconds: float) -> None:
    def ended(sample_seconds: float, samples: list[int]) -> MemoryOverTime:
        memory = pb.MemoryOverTime(sample_seconds=sample_seconds, samples_bytes=samples)
        request = worker_pb2.CompleteTaskRequest(task="projects/default/exports/a:merge:1", memory=memory)
        request.error.CopyFrom(status_of(StageError("it died", reason="STAGE_KILLED").failure()))
        return completion(request, MERGE).memory

    assert ended(0.5, [5, -7, 2**63 - 1]) == MemoryOverTime(0.5, (5, 0, 2**62))
    assert ended(0.5, [1] * 65) == MemoryOverTime()
    assert ended(seconds, [1]) == MemoryOverTime()
