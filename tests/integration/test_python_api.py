"""Exports from programs: ``slipway.export`` and ``slipway.export_async`` with real stages."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import slipway
from slipway.exporting.calls import PlanOptions, export_observed
from slipway.exporting.interruption import Interruption
from slipway.progress.observer import Silent
from support.coordinators.harness import Harness, state
from support.harness.unhurried import unhurried
from support.models import tiny_models
from support.models.merge_models import make_family

pytestmark = pytest.mark.timeout(900)

SETTINGS = {"validation.enabled": False}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


@pytest.fixture
def options(project: Path, tmp_path: Path) -> dict[str, Any]:
    """Arguments for a merge alone, which takes seconds."""
    where = {"base": project / "base", "out": tmp_path / "out", "home": tmp_path / "home"}
    return {**where, "formats": "pytorch", "settings": SETTINGS}


PLAIN = """
import os, sys
import slipway

print("once")
result = slipway.export(
    sys.argv[1], base=sys.argv[2], formats="pytorch", settings={"validation.enabled": False}, out=sys.argv[3]
)
os.write(1, f"{result!r}\\n".encode())
"""
GUARDED = PLAIN.replace("print(", "if __name__ == '__main__':\n  print(", 1).replace("\nresult", "\n  result")
GUARDED = GUARDED.replace("\n    sys", "\n      sys").replace("\n)", "\n  )").replace("\nos.", "\n  os.")


@pytest.mark.parametrize("text", [PLAIN, pytest.param(GUARDED, marks=pytest.mark.slow)], ids=["plain", "guarded"])
def test_a_script_exports_and_nothing_else_is_printed(project: Path, tmp_path: Path, text: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    words = [sys.executable, *map(str, (script, project / "run", project / "base", tmp_path / "out"))]
    environment = {**os.environ, "SLIPWAY_HOME": str(tmp_path / "home")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    once, first, second, third = done.stdout.splitlines()
    assert once == "once"
    assert first.startswith("ExportResult e-")
    assert first.endswith("succeeded, 1 of 1 format made, 1 warning")
    assert second.startswith("pytorch ")
    assert (Path(third) / "pytorch" / "model.safetensors").is_file()
    assert slipway.verify(third).files > 5


@pytest.mark.slow
def test_a_running_loop_goes_on_and_gets_the_progress(project: Path, options: dict[str, Any]) -> None:
    """As in a notebook, where the blocking function is called inside a running loop too."""
    seen: list[tuple[int, slipway.ExportProgress]] = []
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.05)

    async def main() -> tuple[slipway.ExportResult, slipway.ExportResult]:
        ticking = asyncio.create_task(tick())
        result = await slipway.export_async(
            project / "run", **options, progress=lambda progress: seen.append((threading.get_ident(), progress))
        )
        ticking.cancel()
        return result, slipway.export(project / "run", **options)

    first, again = asyncio.run(main())
    assert first.require() is first
    assert again.output_directory == first.output_directory
    assert ticks > 20
    assert {thread for thread, _ in seen} == {threading.get_ident()}
    told = [progress for _, progress in seen]
    assert told[0].title.startswith("checkpoint-10 of run onto base")
    notes = list(dict.fromkeys(progress.note.partition(":")[0] for progress in told if progress.note))
    assert notes == ["reading base", "reading adapter", "starting", f"delivering to {first.output_directory}"]
    states = list(dict.fromkeys(progress.state for progress in told))
    assert states == ["", "queued", "running", "succeeded"]
    merge = list(dict.fromkeys(task.state for progress in told for task in progress.tasks if task.task == "merge"))
    assert merge == ["waiting", "queued", "running", "succeeded"]
    shares = [progress.done for progress in told]
    assert shares == sorted(shares)
    assert (told[-1].done, told[-1].note) == (1.0, "")


@pytest.mark.slow
def test_exports_in_threads_take_turns(project: Path, options: dict[str, Any], tmp_path: Path) -> None:
    """Also the same one twice, which is made once."""
    notes: list[str] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(name: str) -> slipway.ExportResult:
        mine = {**options, "out": tmp_path / name, "settings": {**SETTINGS, "output.naming_pattern": name}}
        return slipway.export(project / "run", **mine, progress=lambda progress: notes.append(progress.note))

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, ("a", "b", "a")))
    assert [Path(result.require().output_directory).name for result in results] == ["a", "b", "a"]
    assert results[0] == results[2]
    assert results[0].export_id != results[1].export_id
    assert "waiting for another export of this process" in notes
    assert handlers == {number: signal.getsignal(number) for number in handlers}


def is_quantizing(progress: slipway.ExportProgress) -> bool:
    return any(task.stage == "quantize" and task.state == "running" and task.phase for task in progress.tasks)


def assert_it_went_on(result: slipway.ExportResult, progress: list[slipway.ExportProgress]) -> None:
    """The export has its outputs, and its merge was not made a second time."""
    assert list(result.require().formats) == ["pytorch", "pytorch-int8"]
    first = next(each for each in progress if each.tasks)
    merge = next(task for task in first.tasks if task.task == "merge")
    assert (merge.state, merge.reused) == ("succeeded", True)


@pytest.fixture
def two_tasks(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "formats": ["pytorch:none+int8"]}


@pytest.mark.slow
def test_a_cancelled_export_has_ended_and_the_next_call_continues(
    project: Path, two_tasks: dict[str, Any], tmp_path: Path
) -> None:
    seen: list[slipway.ExportProgress] = []

    async def cancelled() -> float:
        quantizing = asyncio.Event()
        exporting = asyncio.create_task(
            slipway.export_async(
                project / "run", **two_tasks, progress=lambda told: quantizing.set() if is_quantizing(told) else None
            )
        )
        await quantizing.wait()
        began = time.monotonic()
        exporting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exporting
        return time.monotonic() - began

    assert asyncio.run(cancelled()) < unhurried(6)
    assert not [
        child for child in psutil.Process().children(recursive=True) if "child_main" in " ".join(child.cmdline())
    ]
    assert list((tmp_path / "home" / "scratch").iterdir()) == []
    assert not (tmp_path / "out").exists()
    assert_it_went_on(asyncio.run(slipway.export_async(project / "run", **two_tasks, progress=seen.append)), seen)


@pytest.mark.parametrize("how", ["cancelled", "failed", "failed at once"])
def test_at_a_coordinator_the_export_is_cancelled(
    project: Path, options: dict[str, Any], tmp_path: Path, how: str
) -> None:
    seen: list[slipway.ExportProgress] = []

    async def cancelled(coordinator: str) -> None:
        waiting = asyncio.Event()

        def fail(progress: slipway.ExportProgress) -> None:
            seen.append(progress)
            if progress.state:
                raise LookupError("enough")

        if how == "failed at once":  # in the first event, before the export is watched
            with pytest.raises(LookupError):
                await asyncio.to_thread(
                    slipway.export, project / "run", **options, coordinator=coordinator, progress=fail
                )
            return

        def tell(progress: slipway.ExportProgress) -> None:
            seen.append(progress)
            if progress.state in ("queued", "running"):
                waiting.set()
                if how == "failed":
                    raise LookupError("enough")

        exporting = asyncio.create_task(
            slipway.export_async(project / "run", **options, coordinator=coordinator, progress=tell)
        )
        await waiting.wait()
        if how == "cancelled":
            exporting.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else LookupError):
            await exporting

    (tmp_path / "coordinator").mkdir()
    with Harness(tmp_path / "coordinator", with_worker=False, options={"no_worker_seconds": 600.0}) as harness:
        asyncio.run(asyncio.wait_for(cancelled(harness.address), 120))
        [export] = harness.client.list_exports()
        assert state(harness.finished(export.name)) == "cancelled"
    assert seen[0].title == "checkpoint-10 of run onto base"


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_in_the_programs_function_ends_the_export(
    project: Path, two_tasks: dict[str, Any], asynchronous: bool
) -> None:
    seen: list[slipway.ExportProgress] = []

    def stop(progress: slipway.ExportProgress) -> None:
        if is_quantizing(progress):
            raise LookupError("enough")

    def export() -> slipway.ExportResult:
        if asynchronous:
            return asyncio.run(slipway.export_async(project / "run", **two_tasks, progress=stop))
        return slipway.export(project / "run", **two_tasks, progress=stop)

    with pytest.raises(LookupError, match="enough"):
        export()
    assert_it_went_on(slipway.export(project / "run", **two_tasks, progress=seen.append), seen)


@pytest.mark.slow
def test_an_error_while_delivering_is_raised_as_it_is(project: Path, options: dict[str, Any], tmp_path: Path) -> None:
    """Not as a fault of the output's file system, whose errors have the same type."""
    interruption, error = Interruption(), PermissionError(13, "of the program")

    class Failing(Silent):
        def note(self, message: str) -> None:
            if message.startswith("delivering"):
                interruption.request(error)

    arguments = PlanOptions(**options)
    with pytest.raises(PermissionError) as caught:
        export_observed(Failing(), interruption, project / "run", arguments)
    assert caught.value is error
    assert list((tmp_path / "out").iterdir()) == []


INTERRUPTED = """
import asyncio, sys
import slipway

def tell(progress):
    if any(task.stage == "quantize" and task.state == "running" and task.phase for task in progress.tasks):
        print("quantizing", flush=True)

options = dict(base=sys.argv[2], formats="pytorch:none+int8", settings={"validation.enabled": False}, out=sys.argv[3])
if sys.argv[4] == "async":
    asyncio.run(slipway.export_async(sys.argv[1], progress=tell, **options))
else:
    slipway.export(sys.argv[1], progress=tell, **options)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_ctrl_c_ends_all_and_the_next_call_continues(
    project: Path, two_tasks: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    words = [sys.executable, *map(str, (script, project / "run", project / "base", tmp_path / "out", kind))]
    environment = {**os.environ, "SLIPWAY_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "quantizing\n"
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert process.returncode == -signal.SIGINT
    _, alive = psutil.wait_procs(children, timeout=60)
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in alive if child.is_running())
    seen: list[slipway.ExportProgress] = []
    assert_it_went_on(slipway.export(project / "run", **two_tasks, progress=seen.append), seen)


@pytest.mark.slow
def test_an_export_with_an_output_that_was_not_made_is_not_a_success(tmp_path: Path) -> None:
    make_family("t5 without a head").save_pretrained(tmp_path / "base")
    result = slipway.export(
        base=tmp_path / "base", formats="pytorch,onnx", settings=SETTINGS, out=tmp_path / "out", home=tmp_path / "home"
    )
    assert not result.success
    assert list(result.formats) == ["pytorch"]
    assert result.failed["onnx"].reason == "FAMILY_UNSUPPORTED"
    with pytest.raises(slipway.ModelExportError) as caught:
        result.require()
    assert caught.value.reason == result.reason == "FAMILY_UNSUPPORTED"
    first, second, third = repr(result).splitlines()
    assert "failed: FAMILY_UNSUPPORTED, 1 of 2 formats made" in first
    assert "onnx not run" in second
    assert third.startswith("the model is a T5Model")
