"""Start a Python module in its own process, end it, and explain its failure."""

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
from slipway.machine.processes import python_module, thread_variables
from slipway.settings.stage_environment import stage_environment

GRACE_SECONDS = 3.0


class ChildProcess:
    """A process that runs a module and reads its standard input; the end of the input tells it to end.

    Leaving its context ends the process in any case.

    Args:
        command: The module and its arguments.
        environment: The whole environment of the process.
        workdir: Its current folder; None inherits this process's, which may be a checkpoint whose files libraries would find.
        errors: File for its standard error; None joins it to standard output.
        descriptors: Further file descriptors to pass on.
        own_group: Whether it leads its own process group. Then Ctrl-C does not reach it, and :meth:`kill` also ends all it has started.
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
        """Return whether the process itself is running; processes that it started may outlive it."""
        return self._process.poll() is None

    def send(self, line: bytes) -> None:
        """Write to its standard input, waiting while it is full. Ignore a closed input: :meth:`explain` says why the process ended."""
        with contextlib.suppress(OSError, ValueError):  # it is closed on the other side, or by us
            self.input.write(line)
            self.input.flush()

    def end(self) -> None:
        """Ask the process to end, kill it after a grace period, and wait until it is gone."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # a buffered line that the process did not read
            self.input.close()

    def terminate(self) -> None:
        """Ask the process to end."""
        if self.alive:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the process, and its whole group if it leads one, because processes that it started may outlive it."""
        if self._own_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        elif self.alive:
            self._process.kill()

    def explain(self, *, name: str, said: str) -> Failure:
        """Return the failure of a process that ended without a result.

        Args:
            name: Name of its work, such as the stage's.
            said: The last lines that it wrote.
        """
        killed = _oom_kills() > self._killed_before
        return failure_of_exit(self._process.returncode or 0, stage=name, oom_killed=killed, output=said)


def child_environment(threads: int) -> dict[str, str]:
    """Return the environment of a process with a stage's libraries: limited threads that sleep while they wait, and no model hub."""
    environment = stage_environment(os.environ)
    return {
        **environment,
        **thread_variables(threads, environment=environment),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",  # libraries open files and print without naming an encoding
        "PYTHONIOENCODING": "utf-8:backslashreplace",
    }


def _oom_kills() -> int:
    """Count the processes that the kernel has killed for memory in this container, or else since boot (Linux; 0 elsewhere)."""
    kills = ControlGroup().memory_kills()
    if kills is not None:
        return kills
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
