"""Exports begin with what worked for such a model before, in what their configuration leaves open, and never end worse for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts import LocalStore
from slipway.artifacts.collection import collect
from slipway.artifacts.digests import action_name
from slipway.artifacts.store import ActionResult
from slipway.formats.tasks import PlannedTask
from slipway.planning.precedents import PRECEDENT, Precedent, precedent_key
from slipway.rpc.values import dict_of
from slipway_coordinator.lifecycle.records import TaskRecord
from slipway_coordinator.lifecycle.recovery import AS_PLANNED, is_lasting
from slipway_coordinator.lifecycle.rules import load_rules
from slipway_coordinator.storage.precedents import Precedents
from slipway_protos.v1 import export_pb2
from support.coordinators.attempts import failure
from support.coordinators.harness import STAGE, Harness, state, tiny_export, tiny_task

RULE = """{name: other-engine, reasons: [EXPORT_ENGINE_FAILED, OUT_OF_MEMORY], set: {engine: second, fail: ""},
  say: the second engine, warn: second best}"""
OPEN = ("engine", "fail")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with Harness(tmp_path_factory.mktemp("coordinator")) as harness, one_rule(harness):
        yield harness


@contextmanager
def one_rule(harness: Harness) -> Iterator[None]:
    (harness.home / "rules.yaml").write_text(f"rules: [{RULE}]\nguidance: {{default: [call us]}}\n")
    harness.server.coordinator.rules = load_rules(harness.home / "rules.yaml")
    yield


def task_of(*, reason: str = "EXPORT_ENGINE_FAILED", choices: tuple[str, ...] = OPEN, **params: Any) -> TaskRecord:
    task = tiny_task("a", needs=("m",), engine="first", fail=reason, **params)
    return task.with_(open=choices)


def exported(
    harness: Harness, name: str, task: TaskRecord, *, model: str
) -> tuple[export_pb2.Export, list[export_pb2.Attempt]]:
    """Export other weights of a class of models; return the export and the attempts of the task."""
    merge = tiny_task("m", text=name, facts={"model_class": model})
    export = harness.finished(harness.submit(tiny_export(name, merge, task, base=harness.base())))
    assert state(export) == "succeeded"
    return export, list(export.tasks[1].attempts)


def planned(task: TaskRecord) -> PlannedTask:
    return PlannedTask(task.id, STAGE, task.params, task.inputs, open=task.open)


def key_of(task: TaskRecord, model: str) -> str:
    return precedent_key(planned(task), model, project="default")


def test_the_second_export_of_such_a_model_begins_with_what_worked(shared: Harness) -> None:
    _, first = exported(shared, "first", task_of(), model="A a")
    assert [attempt.rule for attempt in first] == ["", "other-engine"]
    export, second = exported(shared, "second", task_of(), model="A a")
    assert [attempt.rule for attempt in second] == [PRECEDENT]
    assert dict_of(second[0].params)["engine"] == "second"
    assert second[0].note == "began with what worked: engine second, fail none, because first failed 1 time"
    assert list(export.warnings) == ["second best"]  # what the rule said of such a result is true of this one
    _, other = exported(shared, "other", task_of(), model="B b")
    assert [attempt.rule for attempt in other] == ["", "other-engine"]


@pytest.mark.slow
def test_what_is_chosen_stays(shared: Harness) -> None:
    """Where the success took a parameter that was set, it teaches nothing."""
    for turn in (1, 2):
        _, attempts = exported(shared, f"chosen-{turn}", task_of(choices=("engine",)), model="C c")
        assert [attempt.rule for attempt in attempts] == ["", "other-engine"]


@pytest.mark.slow
def test_a_failure_that_may_pass_teaches_nothing(shared: Harness) -> None:
    for turn in (1, 2):
        _, attempts = exported(shared, f"passing-{turn}", task_of(reason="OUT_OF_MEMORY"), model="D d")
        assert [attempt.rule for attempt in attempts] == ["", "other-engine"]
    assert not is_lasting(failure("STAGE_CRASHED"))
    assert is_lasting(failure("EXPORT_PARITY_FAILED"))


@pytest.mark.slow
def test_a_precedent_that_fails_is_as_good_as_none_and_is_replaced(shared: Harness) -> None:
    task = task_of(text="replaced")
    wrong = Precedent({"engine": "third", "fail": "EXPORT_PARITY_FAILED"}, "first failed 1 time", ("third best",))
    shared.store.record_action(key_of(task, "E e"), wrong.to_result())
    export, attempts = exported(shared, "wrong", task, model="E e")
    assert [attempt.rule for attempt in attempts] == [PRECEDENT, AS_PLANNED, "other-engine"]
    assert dict_of(attempts[1].params)["engine"] == "first"
    assert [warning for warning in export.warnings if warning == "second best"]
    _, attempts = exported(shared, "right", task, model="E e")
    assert dict_of(attempts[0].params)["engine"] == "second"


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        ActionResult({}, {PRECEDENT: {"params": {"text": "other"}, "because": "x", "warnings": []}}).to_bytes(),
        ActionResult({}, {PRECEDENT: {"params": {"engine": 7}, "because": "x", "warnings": []}}).to_bytes(),
        ActionResult({}, {PRECEDENT: {"params": [], "because": "x", "warnings": []}}).to_bytes(),
        ActionResult({}, {PRECEDENT: {"params": {"engine": "third"}, "because": None, "warnings": []}}).to_bytes(),
    ],
    ids=["damaged", "not-open", "wrong-type", "wrong-form", "no-reason"],
)
def test_a_damaged_precedent_is_none(tmp_path: Path, data: bytes) -> None:
    store, task = LocalStore(tmp_path / "store"), planned(task_of())
    path = store.root / action_name("a" * 64)
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert Precedents(lambda: store).find("a" * 64, task) is None
    Precedents(lambda: store).keep("a" * 64, Precedent({"engine": "third"}, "first failed 1 time"))
    assert Precedents(lambda: store).find("a" * 64, task) is not None


def test_a_collection_forgets_old_precedents_alone(tmp_path: Path) -> None:
    store, precedent = LocalStore(tmp_path / "store"), Precedent({"engine": "second"}, "first failed 1 time")
    for key, age in (("a" * 64, 0), ("b" * 64, 90_000)):
        store.record_action(key, precedent.to_result())
        path = store.root / action_name(key)
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    collect(store)
    assert store.action("b" * 64) is not None
    collect(store, max_age_seconds=86_400)
    assert store.action("a" * 64) is not None
    assert store.action("b" * 64) is None
