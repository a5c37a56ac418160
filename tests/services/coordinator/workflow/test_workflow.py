"""Exports from request to result: a real coordinator, a real worker, real child processes, tiny stages."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipway.rpc.values import dict_of, failure_of_status
from slipway_coordinator.lifecycle.rules import load_rules
from slipway_protos.v1 import export_pb2
from support.coordinators.harness import Harness, state, states, tiny_export, tiny_task, wait_for, watch


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with Harness(tmp_path_factory.mktemp("coordinator")) as harness:
        yield harness


def text(harness: Harness, digest: str, target: Path) -> str:
    return (harness.store.fetch(digest, target) / "text").read_text()


@contextmanager
def recovering(harness: Harness, folder: Path, rule: str) -> Iterator[None]:
    """The coordinator has one recovery rule, this one."""
    (folder / "rules.yaml").write_text(f"rules: [{rule}]\nguidance: {{default: [call us]}}\n")
    built_in = harness.server.coordinator.rules
    harness.server.coordinator.rules = load_rules(folder / "rules.yaml")
    try:
        yield
    finally:
        harness.server.coordinator.rules = built_in


def test_branches_run_and_meet(shared: Harness, tmp_path: Path) -> None:
    tasks = (
        tiny_task("m"),
        tiny_task("a", needs=("m",)),
        tiny_task("b", needs=("m",)),
        tiny_task("v", needs=("a", "b"), partial=True),
    )
    name = shared.submit(tiny_export("meet", *tasks, base=shared.base()))
    export = shared.finished(name)
    assert state(export) == "succeeded"
    assert set(export.outputs) == {"m", "a", "b", "v"}
    assert text(shared, export.outputs["v"], tmp_path / "v") == "v(a(m(base))+b(m(base)))"
    assert dict_of(export.tasks[0].facts)["count"] == 1
    attempt = export.tasks[3].attempts[0]
    assert attempt.worker
    assert attempt.end_time.ToSeconds() >= attempt.start_time.ToSeconds() > 0


def test_the_same_again_is_reused_and_fast(shared: Harness) -> None:
    tasks = [tiny_task("m"), *(tiny_task(f"t{number}", needs=("m",)) for number in range(8))]
    base = shared.base()
    began = time.monotonic()
    shared.finished(shared.submit(tiny_export("first", *tasks, base=base)))
    between = time.monotonic()
    export = shared.finished(shared.submit(tiny_export("second", *tasks, base=base)))
    assert time.monotonic() - between < between - began
    assert [task.attempts[0].reused for task in export.tasks] == [True] * 9


def test_a_failed_branch_leaves_the_others(shared: Harness) -> None:
    tasks = (
        tiny_task("m", text="branch"),
        tiny_task("bad", needs=("m",), fail="UNSUPPORTED"),
        tiny_task("after", needs=("bad",)),
        tiny_task("good", needs=("m",)),
        tiny_task("v", needs=("m", "bad", "good"), partial=True),
    )
    export = shared.finished(shared.submit(tiny_export("branch", *tasks, base=shared.base())))
    assert states(export) == {
        "m": "succeeded",
        "bad": "failed",
        "after": "skipped",
        "good": "succeeded",
        "v": "succeeded",
    }
    assert state(export) == "failed"
    failure = failure_of_status(export.error)
    assert failure.reason == "UNSUPPORTED"
    assert "(1)" in failure.remedy
    assert failure.about["guidance"]
    assert set(export.outputs) == {"m", "good", "v"}


def test_recovery_changes_parameters_and_says_so(shared: Harness, tmp_path: Path) -> None:
    rule = (
        "{name: other-engine, reasons: [EXPORT_ENGINE_FAILED], when: {about.engine: {in: [first]}},"
        " set: {engine: second, fail: ''}, say: the second engine, warn: second best}"
    )
    with recovering(shared, tmp_path, rule):
        task = tiny_task("m", engine="first", fail="EXPORT_ENGINE_FAILED", text="engines")
        export = shared.finished(shared.submit(tiny_export("engines", task, base=shared.base())))
    assert state(export) == "succeeded"
    first, second = export.tasks[0].attempts
    assert failure_of_status(first.error).reason == "EXPORT_ENGINE_FAILED"
    assert (second.rule, second.note, dict_of(second.params)["engine"]) == (
        "other-engine",
        "the second engine",
        "second",
    )
    assert list(export.warnings) == ["second best"]
    assert export.recovery_profile == "balanced"


def test_a_store_that_does_not_answer_is_waited_for(shared: Harness, tmp_path: Path) -> None:
    rule = "{name: later, reasons: [STORE_UNAVAILABLE], repeat: true, wait_seconds: 0.5, limit: 2, say: later}"
    task = tiny_task("m", fail="STORE_UNAVAILABLE", fail_times=2, text="later", runs=str(tmp_path / "runs"))
    with recovering(shared, tmp_path, rule):
        export = shared.finished(shared.submit(tiny_export("later", task, base=shared.base())))
    assert state(export) == "succeeded"
    attempts = export.tasks[0].attempts
    assert [attempt.rule for attempt in attempts] == ["", "later", "later"]
    waits = [b.start_time.ToNanoseconds() - a.end_time.ToNanoseconds() for a, b in itertools.pairwise(attempts)]
    assert waits[0] >= 0.5e9
    assert waits[1] >= 1.0e9


def test_a_crash_is_tried_again_as_the_rules_say(shared: Harness, tmp_path: Path) -> None:
    task = tiny_task("m", kill=True, text="killed", runs=str(tmp_path / "runs"))
    export = shared.finished(shared.submit(tiny_export("killed", task, base=shared.base())))
    assert state(export) == "failed"
    assert [attempt.rule for attempt in export.tasks[0].attempts] == ["", "killed-again", "killed-again"]
    assert failure_of_status(export.error).reason == "STAGE_KILLED"


def test_the_configured_number_of_attempts_holds(shared: Harness, tmp_path: Path) -> None:
    task = tiny_task("m", kill=True, text="once", runs=str(tmp_path / "runs"))
    record = tiny_export("once", task, base=shared.base(), recovery={"max_attempts": 1})
    assert len(shared.finished(shared.submit(record)).tasks[0].attempts) == 1


def test_an_input_lost_from_the_store_is_made_again(shared: Harness, tmp_path: Path) -> None:
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    tasks = (
        tiny_task("m", text="lost", runs=str(runs)),
        tiny_task("wait", text="wait", sleep_seconds=120, unless=str(gate)),
        tiny_task("late", needs=("m", "wait"), text="late"),
    )
    name = shared.submit(tiny_export("lost", *tasks, base=shared.base()))
    made = wait_for(lambda: shared.client.get_export(name).outputs.get("m"))
    for file in shared.store.manifest(made).files:
        digest = file.digest.removeprefix("sha256:")
        next((shared.home / "store").rglob(digest)).unlink()
    gate.touch()
    export = shared.finished(name)
    assert state(export) == "succeeded"
    assert runs.read_text().split() == ["lost", "lost"]
    assert [attempt.rule for attempt in export.tasks[0].attempts] == ["", "inputs-again"]


def test_cancel_ends_what_runs_and_retry_goes_on(shared: Harness, tmp_path: Path) -> None:
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    tasks = (
        tiny_task("m", text="kept", runs=str(runs)),
        tiny_task("slow", needs=("m",), sleep_seconds=60, unless=str(gate), runs=str(runs)),
        tiny_task("after", needs=("slow",)),
    )
    name = shared.submit(tiny_export("cancel", *tasks, base=shared.base()))
    wait_for(lambda: states(shared.client.get_export(name))["slow"] == "running" and "slow" in runs.read_text())
    began = time.monotonic()
    assert state(shared.client.cancel_export(name)) in {"cancelling", "cancelled"}
    export = shared.finished(name)
    assert time.monotonic() - began < 50  # not 60
    assert state(export) == "cancelled"
    assert states(export) == {"m": "succeeded", "slow": "cancelled", "after": "cancelled"}
    assert state(shared.client.cancel_export(name)) == "cancelled", "a repeated request has the answer of the first"
    gate.touch()
    assert state(shared.client.retry_export(name)) in {"queued", "running"}
    export = shared.finished(name)
    assert state(export) == "succeeded"
    assert runs.read_text().split() == ["kept", "slow", "slow"]


def test_progress_and_logs_reach_those_who_watch(shared: Harness, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    task = tiny_task("m", text="logs", sleep_seconds=120, unless=str(gate))
    events = []
    for event in shared.client.watch_export(shared.submit(tiny_export("logs", task, base=shared.base()))):
        events.append(event)
        if event.progress.phase == "sleeping":
            assert event.progress.task == "m"
            gate.touch()
    assert gate.exists()
    assert any("run 1 of logs" in event.log.message and event.log.task == "m" for event in events)
    sequences = [event.sequence for event in events]
    assert sequences == sorted(set(sequences))


def test_watching_goes_on_after_the_last_event_seen(shared: Harness, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    task = tiny_task("m", text="resumed", sleep_seconds=120, unless=str(gate))
    name = shared.submit(tiny_export("resumed", task, base=shared.base()))
    seen = []
    for event in shared.client.watch_export(name):
        seen.append(event)
        if event.export.tasks and event.export.tasks[0].state == export_pb2.TASK_STATE_RUNNING:
            break
    gate.touch()
    rest = list(shared.client.watch_export(name, after_sequence=seen[-1].sequence))
    assert rest[0].sequence > seen[-1].sequence
    assert state(rest[-1].export) == "succeeded"
    assert list(shared.client.watch_export(name, after_sequence=rest[-1].sequence)) == []


def test_an_exports_timeout_reaches_the_stage(shared: Harness) -> None:
    task = tiny_task("m", text="timeout", sleep_seconds=30)
    settings = {"resources": {"stage_timeout_seconds": 1}, "recovery": {"max_attempts": 1}}
    export = shared.finished(shared.submit(tiny_export("timeout", task, base=shared.base(), **settings)))
    failure = failure_of_status(export.error)
    assert failure.reason == "STAGE_TIMEOUT"
    assert "longer than 1 s" in failure.message


def test_a_watcher_sees_each_state_once(shared: Harness) -> None:
    name = shared.submit(tiny_export("states", tiny_task("m", text="states"), base=shared.base()))
    etags = [export.etag for export in watch(shared.client, name)]
    assert len(etags) == len(set(etags))
