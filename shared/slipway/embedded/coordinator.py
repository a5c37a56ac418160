"""A coordinator and one worker inside this process, used by ``slipway export`` when no coordinator is named.

They are the same coordinator and worker as on a cluster, over a private unix socket. Each export has its own state file and lock,
so the same command resumes where it stopped, and different exports run side by side over one store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Self
from urllib.parse import quote

from slipway.artifacts.opening import open_store
from slipway.client import Client
from slipway.contracts.coordinator import coordinator_service
from slipway.execution.runner import TaskRunner
from slipway.machine.shortages import check_address_space
from slipway.registry import stage_names
from slipway.settings import Settings
from slipway.worker.machine import probe
from slipway.worker.pull import Worker, WorkerOptions

log = logging.getLogger("slipway.embedded")

_LONGEST_SOCKET_PATH = 100  # the kernel allows 107 bytes
_STOP_SECONDS = 10.0


class Embedded:
    """A coordinator and a worker for one export, as a context manager.

    Leaving ends all running work within a few seconds; entering again resumes it.

    Args:
        settings: Places of state, store and scratch.
        export_id: Names the state; the same id is the same export.
        stages: Stages the worker takes; by default all installed ones.

    Raises:
        ServiceError: On entering; reason ``COORDINATOR_LOCKED`` while another process runs the same export, ``STATE_SCHEMA``
            if its state is damaged.
        OSError: A file of its state cannot be opened, or is not a regular file.
        StageError: ``OUT_OF_MEMORY`` if it does not fit into the address space of this process.
    """

    def __init__(self, settings: Settings, export_id: str, *, stages: tuple[str, ...] | None = None) -> None:
        self._settings = settings
        self._folder = settings.exports_path / export_id
        self._stages = stage_names() if stages is None else stages
        self._stack = ExitStack()
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self.client: Client

    def __enter__(self) -> Self:
        # Access to this folder is access to the coordinator in it.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_address_space()
        with ExitStack() as stack:
            stack.enter_context(coordinator_service().hold(self._folder / "state.db"))
            address = f"unix:{quote(str(self._socket(stack)))}"
            started: Future[None] = Future()
            thread = threading.Thread(target=self._serve, args=(address, started), name="slipway-embedded", daemon=True)
            thread.start()
            stack.callback(self._end, thread)
            started.result()
            self.client = stack.enter_context(Client(address))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _socket(self, stack: ExitStack) -> Path:
        path = self._folder / "socket"
        if len(str(path).encode()) > _LONGEST_SOCKET_PATH:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipway-"))) / "socket"
        path.unlink(missing_ok=True)
        stack.callback(path.unlink, missing_ok=True)
        return path

    def _serve(self, address: str, started: Future[None]) -> None:
        try:
            with (
                asyncio.Runner() as runner
            ):  # not asyncio.run, which notebooks replace by one for loops that run already
                runner.run(self._run(address, started))
        except Exception as error:
            if not started.done():
                started.set_exception(error)
            else:
                log.exception("the embedded coordinator stopped")

    async def _run(self, address: str, started: Future[None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = coordinator_service().server(self._folder / "state.db", address, lambda: open_store(self._settings))
        worker = self._worker(address)
        await server.start()
        try:
            working = asyncio.create_task(worker.run())
            started.set_result(None)
            await self._stop.wait()
            worker.stop()
            await working
        finally:
            await server.stop()

    def _worker(self, address: str) -> Worker:
        settings = self._settings
        settings.scratch.mkdir(parents=True, exist_ok=True)
        machine = probe(settings.scratch, self._stages)
        runner = TaskRunner(open_store(settings), settings.scratch, gpu_architecture=machine.gpu_architecture)
        options = WorkerOptions(
            coordinator=address,
            stages=self._stages,
            slots=machine.default_slots(),
            report_seconds=0.25,
            waits_for_room=False,
        )
        return Worker(options, runner, machine)

    def _end(self, thread: threading.Thread) -> None:
        if hasattr(self, "_stop"):
            with contextlib.suppress(RuntimeError):  # the loop is closed already, after an error
                self._loop.call_soon_threadsafe(self._stop.set)
        thread.join(_STOP_SECONDS)
