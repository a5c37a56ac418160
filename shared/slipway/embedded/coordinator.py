"""A coordinator and one worker inside this process, used by ``slipway export`` when no coordinator is named.

They are the same coordinator and worker as on a cluster, over a private unix socket. If the settings choose an engine, tasks run on its nodes
instead, and the coordinator listens where these reach it (:mod:`slipway.embedded.engine_side`). Each export has its own state file and lock,
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
from slipway.embedded.engine_side import EngineSide, check_engine, engine_side
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
        ModelExportError: What :func:`~slipway.embedded.engine_side.check_engine` raises; ``ENGINE_UNAVAILABLE`` or ``ENGINE_UNFIT``.
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
            choice = check_engine(self._settings)
            side = None if choice is None else stack.enter_context(engine_side(choice, self._settings, self._folder))
            address = f"unix:{quote(str(self._socket(stack)))}" if side is None else side.address
            started: Future[int] = Future()
            arguments = (address, side, started)
            thread = threading.Thread(target=self._serve, args=arguments, name="slipway-embedded", daemon=True)
            thread.start()
            stack.callback(self._end, thread)
            port = started.result()
            if side is None:
                self.client = stack.enter_context(Client(address))
            else:
                self.client = stack.enter_context(Client(side.client_address(port), security=side.client))
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

    def _serve(self, address: str, side: EngineSide | None, started: Future[int]) -> None:
        try:
            with (
                asyncio.Runner() as runner
            ):  # not asyncio.run, which notebooks replace by one for loops that run already
                runner.run(self._run(address, side, started))
        except Exception as error:
            if not started.done():
                started.set_exception(error)
            else:
                log.exception("the embedded coordinator stopped")

    async def _run(self, address: str, side: EngineSide | None, started: Future[int]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = coordinator_service().server(
            self._folder / "state.db",
            address,
            lambda: open_store(self._settings),
            None if side is None else side.engine,
        )
        worker = self._worker(address) if side is None else None
        await server.start()
        try:
            working = None if worker is None else asyncio.create_task(worker.run())
            started.set_result(server.port)
            await self._stop.wait()
            if worker is not None and working is not None:
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
