"""Tasks from digests to digests: reuse, failures, nothing left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pydantic import field_validator

from slipway.artifacts import LocalStore
from slipway.execution.failures import surroundings_of
from slipway.execution.runner import TaskResult, TaskRunner
from slipway.stage import Stage, StageParams
from slipway.stage_call import StageCall

SOURCE, ECHO, TROUBLE = "support.stages.plain:SOURCE", "support.stages.plain:ECHO", "support.stages.plain:TROUBLE"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def runner(store: LocalStore, tmp_path: Path) -> TaskRunner:
    return TaskRunner(store, tmp_path / "scratch")


def run(runner: TaskRunner, stage: str, inputs: dict[str, str] | None = None, **params: object) -> TaskResult:
    return asyncio.run(runner.run(StageCall(stage, params, inputs or {})))


def test_tasks_chain_by_digest(runner: TaskRunner, store: LocalStore, tmp_path: Path) -> None:
    first = run(runner, SOURCE, text="one")
    second = run(runner, ECHO, {"in": first.outputs["out"]}, text="two")
    files = store.fetch(second.outputs["out"], tmp_path / "out")
    assert (files / "in-text.txt").read_text() == "one"
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_result_that_exists_is_reused_and_one_that_is_gone_is_made_again(
    runner: TaskRunner, store: LocalStore
) -> None:
    first = run(runner, SOURCE, text="one")
    again = run(runner, SOURCE, text="one")
    assert (first.reused, again.reused) == (False, True)
    assert (again.outputs, again.facts) == (first.outputs, first.facts)
    next(p for p in (store.root / "blobs").rglob("*") if p.is_file()).unlink()
    third = run(runner, SOURCE, text="one")
    assert not third.reused
    assert third.outputs == first.outputs


class StrangeParams(StageParams):
    """Parameters whose check has a fault of its own, which is no error of validation."""

    text: str = ""

    @field_validator("text")
    @classmethod
    def _check(cls, text: str) -> str:
        return {"known": "x"}[text]


STRANGE = Stage(name="strange", version=1, inputs=(), outputs=("out",), params=StrangeParams, run=lambda *_: {})


def test_a_fault_in_the_checks_of_a_stage_is_its_failure(runner: TaskRunner, caplog: pytest.LogCaptureFixture) -> None:
    """An exception would leave the lease without a result, and the coordinator would grant it again at once, for ever."""
    result = run(runner, f"{__name__}:STRANGE", text="other")
    assert result.failure is not None
    assert result.failure.reason == "STAGE_ERROR"
    assert "KeyError" in result.failure.message
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("stage", "inputs", "params", "reason"),
    [
        (ECHO, {}, {}, "INPUT_MISSING"),
        (ECHO, {"in": "sha256:" + "0" * 64, "more": "sha256:" + "0" * 64}, {}, "INPUT_MISSING"),
        (ECHO, {"in": "sha256:" + "0" * 64}, {}, "ARTIFACT_NOT_FOUND"),
        (ECHO, {"in": "nonsense"}, {}, "ARTIFACT_INVALID"),
        (SOURCE, {}, {"text": 5}, "PARAMS_INVALID"),
        ("nonesuch", {}, {}, "STAGE_UNKNOWN"),
        (TROUBLE, {}, {"kind": "typed"}, "ADAPTER_TENSOR_UNUSED"),
    ],
)
def test_failures_are_values(
    runner: TaskRunner, store: LocalStore, tmp_path: Path, stage: str, inputs: dict, params: dict, reason: str
) -> None:
    result = run(runner, stage, inputs, **params)
    assert result.failure is not None
    assert result.failure.reason == reason
    left = surroundings_of(result.failure.about)
    assert left.keys() >= {"memory_available_bytes", "memory_total_bytes", "scratch_free_bytes", "store_free_bytes"}
    assert all(count > 0 for count in left.values())
    assert store.digests() == []
    assert list((tmp_path / "scratch").iterdir()) == []


KILLED = """
import asyncio, sys
from pathlib import Path
from slipway.artifacts import LocalStore
from slipway.execution.failures import surroundings_of
from slipway.execution.runner import TaskRunner
from slipway.stage_call import StageCall
root = Path(sys.argv[1])
runner = TaskRunner(LocalStore(root / "store"), root / "scratch")
spec = StageCall("support.stages.plain:SOURCE", {"seconds": 60}, {})
asyncio.run(runner.run(spec, on_progress=lambda p, m: print(p.phase, flush=True)))
"""


def test_the_work_folder_of_a_killed_process_is_removed_and_a_living_one_s_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["starting\n", "waiting\n"]
    store = LocalStore(tmp_path / "store")
    TaskRunner(store, tmp_path / "scratch")
    assert len(list((tmp_path / "scratch").iterdir())) == 1
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert psutil.wait_procs(children, timeout=60)[1] == []
    TaskRunner(store, tmp_path / "scratch")
    assert list((tmp_path / "scratch").iterdir()) == []
    assert store.digests() == []
