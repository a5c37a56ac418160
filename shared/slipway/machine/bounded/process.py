"""Run functions in a process with limits of time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Self

from slipway.errors import Failure
from slipway.machine.processes import python_module
from slipway.machine.shortages import memory_shortage_in
from slipway.sizes import format_size

_CHILD = "slipway.machine.bounded.child"
_KEPT_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ")
#: Memory of threads and arenas is reserved, and would count against the limit.
_FRUGAL = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
_READ_BYTES = 1 << 16
_LEAVE_SECONDS = 10.0
_SHOWN = 300


class UnboundedWorkError(Exception):
    """A call needed more than its limits; the text says which limit, as the end of a sentence that begins with the work."""


class SilentWorkError(UnboundedWorkError):
    """A call returned nothing within its limit of elapsed time."""


class RefusedWorkError(Exception):
    """A call raised an exception, whose text this is."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one call.

    Attributes:
        seconds: Processor time.
        memory_bytes: Memory, beyond what the process needs for its libraries.
        wait_seconds: Elapsed time without an answer; only a process that is stopped, or a machine that is overloaded, takes so long.
    """

    seconds: float = 5.0
    memory_bytes: int = 1 << 30
    wait_seconds: float = 120.0


class BoundedProcess:
    """A process that calls one function, with arguments and results as JSON.

    It starts with the first call, and again with the call after one that was ended. Leaving its context ends it.

    Args:
        function: ``MODULE:FUNCTION``. An iterator that it returns is read item by item.
        bounds: Limits of a call.
        imports: Modules to import before the limit of memory holds, if they are installed.
    """

    def __init__(self, function: str, bounds: Bounds | None = None, *, imports: Sequence[str] = ()) -> None:
        self._function, self._bounds, self._imports = function, bounds or Bounds(), tuple(imports)
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def call(self, *arguments: Any) -> Any:
        """Return the function's result.

        Raises:
            UnboundedWorkError: It needed more than its limits.
            RefusedWorkError: It raised an exception; one of Slipway's own is raised as such.
        """
        self._send(arguments)
        return self._answer()["value"]

    def items(self, *arguments: Any) -> Iterator[Any]:
        """Yield what the function yields; a reader that stops early ends the process.

        Raises:
            UnboundedWorkError: All items together needed more than the limits.
            RefusedWorkError: The function raised an exception; as above.
        """
        self._send(arguments)
        done = False
        try:
            while "item" in (answer := self._answer()):
                yield answer["item"]
            done = True
        finally:
            if not done:
                self.end()

    def end(self) -> None:
        """End the process, if there is one."""
        process, self._process, self._rest = self._process, None, b""
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # input that the process did not read
                    pipe.close()  # type: ignore[union-attr] # both are pipes
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _send(self, arguments: Sequence[Any]) -> None:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: the answer says why
            self._process.stdin.write(json.dumps(arguments, default=_placeholder).encode() + b"\n")
            self._process.stdin.flush()

    def _start(self) -> None:
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        self._process = subprocess.Popen(
            python_module(
                _CHILD,
                self._function,
                str(self._bounds.seconds),
                str(self._bounds.memory_bytes),
                *self._imports,
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**kept, **_FRUGAL},
        )

    def _answer(self) -> dict[str, Any]:
        line = self._line()
        if line is None:
            error = self._end_error()
            self.end()
            raise error
        answer: dict[str, Any] = json.loads(line)
        if answer.get("memory"):
            self.end()
            raise UnboundedWorkError(self._memory_message())
        if "failure" in answer:
            raise Failure.from_json(answer["failure"]).error()
        if "refused" in answer:
            raise RefusedWorkError(answer["refused"])
        return answer

    def _line(self) -> bytes | None:
        """Return the next line of the process; None if it ended before."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        parts, until = [self._rest], time.monotonic() + self._bounds.wait_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in parts[-1]:
                if not selector.select(max(0.0, until - time.monotonic())):
                    self.end()
                    raise SilentWorkError(f"takes more than {self._bounds.wait_seconds:g} s")
                data = os.read(process.stdout.fileno(), _READ_BYTES)
                if not data:
                    return None
                parts.append(data)
        last, _, self._rest = parts[-1].partition(b"\n")
        return b"".join([*parts[:-1], last])

    def _end_error(self) -> UnboundedWorkError:
        process = self._process
        assert process is not None
        assert self._errors is not None
        try:
            process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:  # a thread of a library may keep it
            process.kill()
            process.wait()
        self._errors.seek(0)
        said = self._errors.read(_READ_BYTES).decode(errors="replace").strip()
        if process.returncode == -signal.SIGPROF:
            return UnboundedWorkError(f"takes more than {self._bounds.seconds:g} s of processor time")
        killed = process.returncode in {-signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV}
        if killed or memory_shortage_in(said) is not None:
            return UnboundedWorkError(self._memory_message())
        last = said.splitlines()[-1][:_SHOWN] if said else "it said nothing"
        return UnboundedWorkError(f"ends the process that does it (status {process.returncode}: {last})")

    def _memory_message(self) -> str:
        return f"needs more than {format_size(self._bounds.memory_bytes)} of memory"


def _placeholder(value: object) -> str:
    """Stand for what JSON does not have, as transformers does for templates."""
    return f"<{type(value).__name__}>"
