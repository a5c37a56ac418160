"""What runs on a node of a Ray cluster: the host of one task's worker, and the check that a node can run workers.

Only the standard library is imported at the top, and the module travels to the nodes as a copy: a node that lacks Slipway, or has another
version, has to say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

_STOP_SECONDS = 3.5
"""How long a worker may take to return its task: its stage gets three seconds."""
_CONNECT_SECONDS = 10.0
_LAST_LINES = 20
_LONGEST_LINE = 4096
"""Of a line that a worker writes; what is longer arrives in parts."""
_BEGIN_SECONDS = 60.0
"""How long a host waits for its worker's start: the driver that asked for the host may be gone."""
_FETCH_SECONDS = 600.0
"""How long a host keeps its result for a driver of a later process. Until then it keeps its place on the node, too."""
_FAMILIES = ("SLIPWAY_TOKEN", "SLIPWAY_TLS_", "AWS_")
"""Beginnings of variables that say who a worker is. Of a family that the coordinator gives, the node's own are left out."""
_NEVER_BEGAN = (1, "its worker was never started")


def node_fault(start: dict[str, Any]) -> str:
    """Return why this node cannot run a coordinator's workers; empty if it can.

    Args:
        start: ``version`` of the coordinator, its address ``coordinator``, and ``store`` with its ``mark``.
    """
    try:
        from slipway.distribution import own_version
    except ImportError:
        return f"Slipway is not installed for {sys.executable}"
    if own_version() != start["version"]:
        return f"it has Slipway {own_version()}, the coordinator {start['version']}"
    if start["mark"] and not (Path(start["store"]) / start["mark"]).exists():
        return (
            f"the artifact store {start['store']} is not the same folder there: share it, or use SLIPWAY_STORE=s3://…"
        )
    host, _, port = start["coordinator"].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        return f"it does not reach {start['coordinator']} ({error}): set SLIPWAY_ENGINE_LISTEN to an address that it reaches"
    return ""


class TaskHost:
    """Runs one worker. It is an actor: its methods are called from the driver, also from that of a later process.

    Args:
        attempt: Key of the task's attempt.
    """

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._cancelled = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
        self._result: asyncio.Task[tuple[int, str]] | None = None
        self._began = asyncio.Event()

    async def about(self) -> tuple[str, str]:
        """Return the attempt's key and the id of this node; the answer says that the submission has a place."""
        import ray

        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())
        return self._attempt, ray.get_runtime_context().get_node_id()

    async def run(self, start: dict[str, Any], arguments: list[str]) -> tuple[int, str]:
        """Run the worker; return its exit code and the last lines that it wrote. A second call waits for the first.

        Args:
            start: As :func:`node_fault`, with ``environment`` and ``files``.
            arguments: Arguments of the program ``slipway``.
        """
        if self._result is None:
            self._result = asyncio.create_task(self._run(start, arguments))
            self._began.set()
        return await asyncio.shield(self._result)

    async def ended(self) -> tuple[int, str]:
        """Wait for the worker's end, and return what :meth:`run` returns."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEGIN_SECONDS):
                await self._began.wait()
        return _NEVER_BEGAN if self._result is None else await asyncio.shield(self._result)

    async def cancel(self) -> None:
        """End the worker, which returns its task before; return when it has ended."""
        self._cancelled.set()
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()

    async def _leave(self) -> None:
        """Give the place on the node back if no driver does it."""
        import ray

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEGIN_SECONDS):
                await self._began.wait()
        if self._result is not None:
            await asyncio.wait({self._result})
            await asyncio.sleep(_FETCH_SECONDS)
        ray.actor.exit_actor()

    async def _run(self, start: dict[str, Any], arguments: list[str]) -> tuple[int, str]:
        if fault := await asyncio.to_thread(node_fault, start):  # the node may have come later than the first check
            return 1, fault
        if self._cancelled.is_set():
            return _NEVER_BEGAN
        from slipway.machine.processes import python_module  # it is there, by that check

        with tempfile.TemporaryDirectory(prefix="slipway-task-") as folder:
            given = [*start["environment"], *start["files"]]
            replaced = tuple(family for family in _FAMILIES if any(name.startswith(family) for name in given))
            inherited = {name: value for name, value in os.environ.items() if not name.startswith(replaced)}
            environment = {**inherited, **start["environment"]}
            for name, content in start["files"].items():
                path = Path(folder) / name
                path.write_text(content, encoding="utf-8")
                environment[name] = str(path)
            self._process = await asyncio.create_subprocess_exec(
                *python_module("slipway.engines.ray.task_worker", str(os.getpid()), *arguments),
                cwd=folder,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            if self._cancelled.is_set():  # meanwhile
                self._process.kill()
            assert self._process.stdout is not None
            async for text in _lines(self._process.stdout):
                self._lines.append(text)
                print(text, flush=True)  # Ray keeps it as the actor's log
            return await self._process.wait(), "\n".join(self._lines)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield the lines of a stream, long ones in parts."""
    rest = b""
    while data := await stream.read(_LONGEST_LINE):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line[:_LONGEST_LINE].decode(errors="replace").rstrip()
        if len(rest) >= _LONGEST_LINE:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace").rstrip()
