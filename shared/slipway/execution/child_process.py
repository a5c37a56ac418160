"""A Python module in a process of its own: how it is started, ended and explained, whoever watches it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self

from slipway.errors import Failure
from slipway.execution.failures import failure_of_exit
from slipway.machine.cgroup import ControlGroup
from slipway.machine.python_process import python_module
from slipway.machine.threads import thread_variables
from slipway.settings.stage_environment import stage_environment

GRACE_SECONDS = 3.0


class ChildProcess:
    """A process that runs a module and reads its standard input, whose end tells it that nobody waits for it any more.

    It is ended when its context is left, whatever the way.

    Args:
        command: The module and its arguments.
        environment: All of the process's environment.
        workdir: Its current folder; ours if None, although that may be a checkpoint, and libraries look for files where they are.
        errors: File for its standard error, which otherwise goes where its output goes.
        descriptors: Further file descriptors for it.
        own_group: Whether it leads a group of its own. Ctrl-C is not for that, and ends with it what it has started.
    """

    def __init__(
        self,
        *command: str,
        environment: Mapping[str, str],
        workdir: Path | None = None,
        errors: IO[str] | None = None,
        descriptors: tuple[int, ...] = (),
        own_group: bool = False,
    ) -> None:
        self._own_group = own_group
        self._killed_before = _oom_kills()
        self._process = subprocess.Popen(
            python_module(*command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if errors is None else errors,
            pass_fds=descriptors,
            cwd=workdir,
            env=environment,
            start_new_session=own_group,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input, self.output = self._process.stdin, self._process.stdout
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
        self.output.close()

    @property
    def alive(self) -> bool:
        """Whether the process itself is there; what it has started may outlive it."""
        return self._process.poll() is None

    def send(self, line: bytes) -> None:
        """Write to its standard input, waiting while that is full; one that is gone says why by its end."""
        with contextlib.suppress(OSError):
            self.input.write(line)
            self.input.flush()

    def end(self) -> None:
        """End it, politely first, and wait until it is gone."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # a line that it did not read any more
            self.input.close()

    def terminate(self) -> None:
        """Ask it to end."""
        if self.alive:
            self._process.terminate()

    def kill(self) -> None:
        """End it, and all of its group if it leads one: the leader may be gone, but what it started need not be."""
        if self._own_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        elif self.alive:
            self._process.kill()

    def explain(self, *, name: str, said: str) -> Failure:
        """Return the failure of one that ended without a result.

        Args:
            name: What it did.
            said: The last lines that it wrote.
        """
        killed = _oom_kills() > self._killed_before
        return failure_of_exit(self._process.returncode or 0, stage=name, oom_killed=killed, output=said)


def child_environment(threads: int) -> dict[str, str]:
    """Return what a process with a stage's libraries gets of ours: threads limited and asleep while they wait, no model hub."""
    environment = stage_environment(os.environ)
    return {
        **environment,
        **thread_variables(threads, environment=environment),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",  # libraries open files, and print, without saying in which encoding
        "PYTHONIOENCODING": "utf-8:backslashreplace",
    }


def _oom_kills() -> int:
    """Processes the kernel has killed for memory, in this container or else since boot (Linux; 0 elsewhere)."""
    kills = ControlGroup().memory_kills()
    if kills is not None:
        return kills
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
