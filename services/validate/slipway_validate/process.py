"""Runs one runner process and waits for it: progress on, cancellation and time limit enforced, crashes made typed."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from slipway.stage import Context
from slipway_validate.protocol import RESULT_FILE, SPEC_FILE, RunResult, Spec

STDERR_FILE = "stderr.log"
POLL_SECONDS = 0.1
TERMINATE_SECONDS = 1.0
LAST_LINES = 8


def run(spec: Spec, folder: Path, ctx: Context, *, label: str, timeout_seconds: float) -> RunResult:
    """Run a spec in a process of its own and return its result; a crash or a timeout is a failed result.

    Args:
        spec: What to do.
        folder: New folder for spec, logits and result.
        ctx: The stage's context; its cancellation ends the process.
        label: What progress is reported as.
        timeout_seconds: The process is ended after this many seconds.

    Raises:
        StageError: ``CANCELLED``.
    """
    folder.mkdir(parents=True)
    (folder / SPEC_FILE).write_text(spec.model_dump_json(), encoding="utf-8")
    threads = spec.run.threads if spec.run else ctx.threads
    deadline = time.monotonic() + timeout_seconds
    with _started(folder, threads=threads) as process:
        lines = _lines_of(process)
        while process.poll() is None:
            _forward_progress(lines, ctx, label=label)
            if time.monotonic() > deadline:
                message = f"it did not finish within {timeout_seconds:g} s"
                return RunResult(status="failed", reason="STAGE_TIMEOUT", message=message)
        ctx.check_cancelled()
        return _result(folder, process.returncode)


@contextmanager
def _started(folder: Path, *, threads: int) -> Iterator[subprocess.Popen[str]]:
    """The runner, ended and waited for when the context is left, whatever the way."""
    # -P keeps the current directory off the import path.
    command = [sys.executable, "-P", "-m", "slipway_validate.runner", str(folder.absolute())]
    with (folder / STDERR_FILE).open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # never written to: its end tells the runner that we are gone
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=_environment(threads),
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(TERMINATE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _environment(threads: int) -> dict[str, str]:
    """Ours, with the thread count fixed before any library starts its pool, and no way to a model hub."""
    fixed = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **fixed}


def _lines_of(process: subprocess.Popen[str]) -> queue.SimpleQueue[str]:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert process.stdout is not None
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    return lines


def _read(pipe: IO[str], lines: queue.SimpleQueue[str]) -> None:
    try:
        for line in pipe:
            lines.put(line)
    except ValueError:  # closed by us while reading: the process was ended
        return


def _forward_progress(lines: queue.SimpleQueue[str], ctx: Context, *, label: str) -> None:
    """Wait a moment for a line of progress and pass it on; raises when the stage is cancelled."""
    ctx.check_cancelled()
    try:
        line = lines.get(timeout=POLL_SECONDS)
    except queue.Empty:
        return
    try:
        event = json.loads(line)
        done, total = int(event["done"]), int(event["total"])
    except (ValueError, KeyError, TypeError):  # a library printed something
        return
    ctx.progress(label, done=done, total=total, unit="samples")


def _result(folder: Path, code: int) -> RunResult:
    path = folder / RESULT_FILE
    if code == 0 and path.is_file():
        return RunResult.model_validate_json(path.read_text(encoding="utf-8"))
    said = _last_lines(folder / STDERR_FILE)
    if code == -signal.SIGKILL:
        message = "its process was killed, most often by the kernel because memory ran out"
        return RunResult(status="failed", reason="STAGE_KILLED", message=message + said)
    if code < 0:
        message = f"its process crashed in native code with {signal.Signals(-code).name}"
        return RunResult(status="failed", reason="STAGE_CRASHED", message=message + said)
    return RunResult(status="failed", reason="STAGE_ERROR", message=f"its process ended with code {code}{said}")


def _last_lines(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:]
    return "; it said last: " + " | ".join(lines) if lines else ""
