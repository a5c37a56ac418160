"""Run one stage for ``slipway stage``; the target folder appears only with all outputs in it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipway.artifacts.adopting import place_adopted
from slipway.errors import ArtifactError, ConfigurationError
from slipway.execution.execution import Execution
from slipway.execution.supervisor import Outcome, execute
from slipway.files.json_documents import parse_json
from slipway.files.paths import all_files, check_local
from slipway.files.regular_file import check_regular
from slipway.files.work_folders import publish, unfinished
from slipway.machine.cgroup import ControlGroup, available_memory, usable_cores
from slipway.progress.display import StageReporter, open_display
from slipway.progress.observer import ProgressForm
from slipway.registry import load_stage
from slipway.stage_call import Limits, StageCall

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def parse_pairs(pairs: Sequence[str], *, flag: str) -> dict[str, str]:
    """Parse ``NAME=VALUE`` texts into a dict.

    Raises:
        ConfigurationError: ``PARAMS_INVALID``.
    """
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigurationError(
                f"{flag} {pair!r} is not NAME=VALUE",
                reason="PARAMS_INVALID",
                remedy=f"write {flag} {name or 'NAME'}=VALUE",
            )
        if name in values:
            raise ConfigurationError(f"{flag} {name} is given twice", reason="PARAMS_INVALID", remedy="give it once")
        values[name] = value
    return values


def run_stage(
    name: str,
    *,
    out: Path,
    inputs: Mapping[str, Path],
    params: Mapping[str, str],
    threads: int = 0,
    timeout: float | None = None,
    progress: ProgressForm = ProgressForm.AUTO,
    level: str = "info",
) -> dict[str, Any]:
    """Run a stage and move its outputs to ``out``; return outputs, facts and peak memory.

    Raises:
        ConfigurationError: ``STAGE_UNKNOWN``, ``PARAMS_INVALID``, ``INPUT_MISSING``.
        ArtifactError: ``OUTPUT_EXISTS``, ``FILE_ERROR``.
        ModelExportError: The failure of the stage.
    """
    check_local(out, named_by="--out")
    stage = load_stage(name)
    group = ControlGroup()
    limits = Limits(timeout or 0.0, available_memory(group.memory()) // 2, threads or usable_cores(group))
    folders = {key: folder.resolve() for key, folder in inputs.items()}
    call = StageCall(name, {key: _parse_value(text) for key, text in params.items()}, {}, limits).on_folders(folders)
    stage = call.step(stage)
    call.check(stage)
    for key, folder in sorted(inputs.items()):
        if not folder.is_dir():
            raise ArtifactError(f"input {key}: {folder} is not a folder", reason="FILE_ERROR", about={"file": folder})
        for _ in all_files(folder):  # refuses links out of the folder, and pipes on which libraries would block
            pass
    check_new_folder(out)
    with unfinished(out) as scratch:
        workdir = scratch / "work"
        workdir.mkdir()
        outcome = run_call(call, workdir, name=name, progress=progress, level=level)
        if outcome.adopted:
            place_adopted(outcome.outputs[stage.main_output], folders, outcome.adopted)
        return _move(outcome, out, scratch)


def check_new_folder(out: Path) -> None:
    """Refuse a target that exists, unless it is an empty folder.

    Raises:
        ArtifactError: ``OUTPUT_EXISTS``.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ArtifactError(
            f"{out} already exists", reason="OUTPUT_EXISTS", remedy="name a new folder", about={"folder": out}
        )


def check_file(path: Path) -> None:
    """Refuse a source that is not a readable regular file.

    Raises:
        ArtifactError: ``FILE_ERROR``.
    """
    try:
        check_regular(path)
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be read: {error.strerror or error}", reason="FILE_ERROR", about={"file": path}
        ) from error


def run_call(call: StageCall, workdir: Path, *, name: str, progress: ProgressForm, level: str) -> Outcome:
    """Run a call in a process of its own and return its outcome.

    Raises:
        ModelExportError: The failure of the stage.
    """
    with _restore_signal_handlers(), open_display(progress, level=level) as display:
        return asyncio.run(_run_interruptibly(Execution(call, workdir), StageReporter(name, display)))


async def _run_interruptibly(execution: Execution, reporter: StageReporter) -> Outcome:
    """Run an execution; on Ctrl-C and SIGTERM, end the child first and then this process.

    Raises:
        ModelExportError: The failure of the stage.
    """
    loop = asyncio.get_running_loop()
    with reporter:
        running = asyncio.ensure_future(execute(execution, on_progress=reporter.progress, on_log=reporter.log))
        for number in _SIGNALS:
            with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not the main thread
                loop.add_signal_handler(number, running.cancel)
        try:
            outcome = await running
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        if outcome.failure is not None:
            raise outcome.failure.error()
        return outcome


@contextlib.contextmanager
def _restore_signal_handlers() -> Iterator[None]:
    """Restore the previous signal handlers, because an event loop sets Python's defaults when it ends."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(ValueError):  # not the main thread, where nothing was changed
                signal.signal(number, handler)


def _move(outcome: Outcome, out: Path, scratch: Path) -> dict[str, Any]:
    ready = scratch / "ready"
    ready.mkdir()
    for name, folder in sorted(outcome.outputs.items()):
        shutil.move(folder, ready / name)
    publish(ready, out)
    return {
        "outputs": {name: str((out / name).resolve()) for name in sorted(outcome.outputs)},
        "facts": outcome.facts,
        "peak_memory_bytes": outcome.peak_memory_bytes,
    }


def _parse_value(text: str) -> Any:
    """Parse a parameter's value as JSON; return the text itself if it is not JSON."""
    try:
        return parse_json(text.encode())
    except ValueError:
        return text
