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
from pathlib import Path
from typing import Any

_STOP_SECONDS = 3.5
"""How long a worker may take to return its task: its stage gets three seconds."""
_CONNECT_SECONDS = 10.0
_LAST_LINES = 20
_LONGEST_LINE = 1 << 20


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
        self._result: asyncio.Task[tuple[int, str]] | None = None
        self._began = asyncio.Event()

    async def about(self) -> tuple[str, str]:
        """Return the attempt's key and the id of this node; the answer says that the submission has a place."""
        import ray

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
        await self._began.wait()
        assert self._result is not None
        return await asyncio.shield(self._result)

    async def cancel(self) -> None:
        """End the worker, which returns its task before; return when it has ended."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()

    async def _run(self, start: dict[str, Any], arguments: list[str]) -> tuple[int, str]:
        if fault := await asyncio.to_thread(node_fault, start):  # the node may have come later than the first check
            return 1, fault
        with tempfile.TemporaryDirectory(prefix="slipway-task-") as folder:
            environment = {**os.environ, **start["environment"]}
            for name, content in start["files"].items():
                path = Path(folder) / name
                path.write_text(content, encoding="utf-8")
                environment[name] = str(path)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "slipway.engines.ray.task_worker", str(os.getpid()), *arguments),
                cwd=folder,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=_LONGEST_LINE,
            )
            assert self._process.stdout is not None
            async for line in self._process.stdout:
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                print(text, flush=True)  # Ray keeps it as the actor's log
            return await self._process.wait(), "\n".join(self._lines)
