"""Every end of a stage's process, with real processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slipway.execution.child_process import GRACE_SECONDS
from slipway.execution.execution import Execution
from slipway.execution.failures import surroundings_of
from slipway.execution.supervisor import Outcome, execute
from slipway.stage import Progress
from slipway.stage_call import Limits, StageCall
from support.harness.unhurried import unhurried


def run(stage: str, workdir: Path, *, timeout: float | None = None, **params: object) -> Outcome:
    workdir.mkdir(exist_ok=True)
    call = StageCall(f"support.stages.plain:{stage}", params, {}, Limits(timeout_seconds=timeout or 0))
    return asyncio.run(execute(Execution(call, workdir)))


def descendants() -> set[psutil.Process]:
    """Return the descendants of this process."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture
def shared() -> set[psutil.Process]:
    """Return the processes that earlier tests left for later ones."""
    return descendants()


def test_a_stage_gives_outputs_facts_progress_and_log(tmp_path: Path) -> None:
    seen: list[Progress] = []
    logs: list[tuple[str, str]] = []
    execution = Execution(StageCall("support.stages.plain:SOURCE", {"text": "hi", "seconds": 0.3}, {}), tmp_path)
    outcome = asyncio.run(
        execute(execution, on_progress=lambda p, _: seen.append(p), on_log=lambda *record: logs.append(record))
    )
    assert outcome.failure is None
    assert (outcome.outputs["out"] / "text.txt").read_text() == "hi"
    assert outcome.facts == {"length": 2}
    assert seen
    assert {p.phase for p in seen} == {"waiting"}
    assert ("info", "echoed") in logs
    assert outcome.peak_memory_bytes > 1 << 20


def test_an_event_that_cannot_be_shown_is_the_reason_and_not_what_it_did_to_the_child(tmp_path: Path) -> None:
    def show(progress: Progress, memory: int) -> None:
        raise LookupError(f"no place for {progress.phase}")

    execution = Execution(StageCall("support.stages.plain:SOURCE", {"text": "hi", "seconds": 0.3}, {}), tmp_path)
    outcome = asyncio.run(execute(execution, on_progress=show))
    assert outcome.failure is not None
    assert "LookupError: no place for waiting" in outcome.failure.message


@pytest.mark.parametrize(
    ("kind", "reason", "says"),
    [
        ("segfault", "STAGE_CRASHED", "about to crash"),
        ("abort", "STAGE_CRASHED", "SIGABRT"),
        ("orphan", "STAGE_CRASHED", "SIGABRT"),
        ("exit", "STAGE_ERROR", "exit code 7"),
        ("kill", "STAGE_KILLED", "SIGKILL"),
        ("torch-memory", "OUT_OF_MEMORY", "allocate"),
        ("typed", "ADAPTER_TENSOR_UNUSED", "odd"),
        ("untyped", "STAGE_ERROR", "nobody foresaw this"),
        ("outside", "STAGE_ERROR", "not a folder below"),
        ("undeclared", "STAGE_ERROR", "declares the outputs"),
        ("missing-file", "FILE_ERROR", "nothing.txt"),
    ],
)
def test_every_end_is_a_typed_failure(
    kind: str, reason: str, says: str, tmp_path: Path, shared: set[psutil.Process]
) -> None:
    outcome = run("TROUBLE", tmp_path / "w", kind=kind)
    assert outcome.failure is not None
    assert outcome.failure.reason == reason
    assert says in str(outcome.failure)
    left = surroundings_of(outcome.failure.about)
    assert 0 < left["memory_available_bytes"] <= left["memory_total_bytes"] <= psutil.virtual_memory().total
    assert left["scratch_free_bytes"] > 0
    assert descendants() <= shared


def test_wrong_parameters_are_typed(tmp_path: Path) -> None:
    outcome = run("SOURCE", tmp_path, txt="typo")
    assert outcome.failure is not None
    assert outcome.failure.reason == "PARAMS_INVALID"
    assert "txt" in outcome.failure.message


def test_an_unknown_stage_is_typed(tmp_path: Path) -> None:
    outcome = asyncio.run(execute(Execution(StageCall("nonesuch", {}, {}), tmp_path)))
    assert outcome.failure is not None
    assert outcome.failure.reason == "STAGE_UNKNOWN"


def test_a_full_disk_is_typed(small_disk: Path) -> None:
    outcome = run("TROUBLE", small_disk / "w", kind="disk")
    assert outcome.failure is not None
    assert outcome.failure.reason == "DISK_FULL"


def test_a_stage_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path, shared: set[psutil.Process]) -> None:
    start = time.monotonic()
    outcome = run("TROUBLE", tmp_path, kind="hang", timeout=1.5)
    assert outcome.failure is not None
    assert outcome.failure.reason == "STAGE_TIMEOUT"
    assert surroundings_of(outcome.failure.about)["memory_total_bytes"] > 0
    assert time.monotonic() - start < 120  # not 600
    assert descendants() <= shared


def test_cancelling_ends_a_stage_that_ignores_it(tmp_path: Path, shared: set[psutil.Process]) -> None:
    async def cancel_soon() -> float:
        execution = Execution(StageCall("support.stages.plain:TROUBLE", {"kind": "hang"}, {}), tmp_path)
        hanging = asyncio.Event()
        task = asyncio.create_task(execute(execution, on_progress=lambda *_: hanging.set()))
        await asyncio.wait_for(hanging.wait(), 60)
        start = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - start

    assert asyncio.run(cancel_soon()) < GRACE_SECONDS + 60  # not 600
    assert descendants() <= shared


def test_cancelling_ends_a_stage_that_listens_at_once(tmp_path: Path) -> None:
    async def cancel_soon() -> float:
        execution = Execution(StageCall("support.stages.plain:SOURCE", {"seconds": 60}, {}), tmp_path)
        started = asyncio.Event()
        task = asyncio.create_task(execute(execution, on_progress=lambda *_: started.set()))
        await asyncio.wait_for(started.wait(), 60)
        start = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - start

    assert asyncio.run(cancel_soon()) < unhurried(GRACE_SECONDS)  # it was not waited for, and then killed


PARENT = """
import asyncio, sys
from pathlib import Path
from slipway.execution.execution import Execution
from slipway.execution.supervisor import execute
from slipway.stage_call import Limits, StageCall
execution = Execution(StageCall("support.stages.plain:TROUBLE", {"kind": sys.argv[2]}, {}), Path(sys.argv[1]))
outcome = asyncio.run(execute(execution, on_progress=lambda p, m: print(p.phase, flush=True)))
print(outcome.failure.reason if outcome.failure else "none", flush=True)
"""


def test_nothing_survives_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), "hang"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "hanging\n"
    started: list[psutil.Process] = []
    deadline = time.monotonic() + 60  # what it starts is not itself until its own program is loaded
    while not any("time.sleep(600)" in " ".join(process.cmdline()) for process in started):
        assert time.monotonic() < deadline
        started = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def memory_group(limit_bytes: int) -> Path:
    """Make a limited memory control group of the kernel's version; skip if that is impossible."""
    name = f"slipway-test-{os.getpid()}"
    for parent, file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / file).exists():
            (group / file).write_text(str(limit_bytes))
            return group
        group.rmdir()
    pytest.skip("no memory control group can be made here")


def test_a_kill_by_the_kernel_for_memory_is_told_from_any_other(tmp_path: Path) -> None:
    group = memory_group(300 << 20)
    join = f"from pathlib import Path; import os; Path({str(group)!r}, 'cgroup.procs').write_text(str(os.getpid()))\n"
    try:
        done = subprocess.run(
            [sys.executable, "-c", join + PARENT, str(tmp_path), "memory"], capture_output=True, text=True, timeout=240
        )
        assert done.stdout.split()[-1] == "OUT_OF_MEMORY", done.stdout + done.stderr
        assert done.returncode == 0
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def test_a_stage_that_lacks_a_library_says_what_installs_it(tmp_path: Path) -> None:
    """Also where the stage has put an error of its own around it."""
    for stage in ("NEEDY", "WRAPPING"):
        failure = run(stage, tmp_path / stage).failure
        assert failure is not None
        assert failure.reason == "UNSUPPORTED"
        assert "No module named 'slipway_no_such_library'" in failure.message
        assert failure.remedy == "pip install slipway-no-such-library"
    failure = run("MISTAKEN", tmp_path / "mistaken").failure  # all its libraries are there
    assert failure is not None
    assert failure.reason == "STAGE_ERROR"
