"""A real coordinator and worker for tests, in this process or in their own processes, with tiny stages."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipway.artifacts import ArtifactStore, LocalStore
from slipway.client import Client
from slipway.configuration import parse
from slipway.execution.runner import TaskRunner
from slipway.security.server import ServerSecurity
from slipway.worker.machine import probe
from slipway.worker.pull import Worker, WorkerOptions
from slipway_coordinator.broker.submitter import EngineSetup
from slipway_coordinator.coordinator import CoordinatorOptions
from slipway_coordinator.leadership.file_lock import hold_lock
from slipway_coordinator.leadership.locks import lock_of
from slipway_coordinator.lifecycle.records import ExportRecord, TaskRecord
from slipway_coordinator.server import CoordinatorServer
from slipway_coordinator.storage.database_access import SqliteState
from slipway_coordinator.webhooks.receivers import WebhooksFile
from slipway_protos.v1 import export_pb2
from support.commands.cli import SLIPWAY

STAGE = "support.stages.watched:STAGE"
DIGEST = "sha256:" + hashlib.sha256(b"nothing").hexdigest()


def tiny_task(task_id: str, *, needs: tuple[str, ...] = (), partial: bool = False, **params: Any) -> TaskRecord:
    """Make a task of the tiny stage; its text is its id."""
    inputs = {f"from-{need}": f"task:{need}/out" for need in needs} or {"base": "source:base"}
    return TaskRecord(
        id=task_id,
        stage=params.pop("stage", STAGE),
        params={"text": task_id, **params},
        inputs=inputs,
        format=task_id,
        partial=partial,
    )


def tiny_export(export_id: str, *tasks: TaskRecord, base: str = DIGEST, **settings: Any) -> ExportRecord:
    """Make an export of tiny tasks."""
    return ExportRecord(
        name=f"projects/default/exports/{export_id}",
        configuration=parse(settings).model_dump(mode="json"),
        request_hash=export_id,
        sources={"base": base},
        tasks=tasks,
        create_time=time.time(),
    )


@dataclass
class Harness:
    """A coordinator and perhaps a worker, on a separate event loop in this process."""

    home: Path
    stages: tuple[str, ...] = (STAGE,)
    with_worker: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    security: ServerSecurity | None = None  # if given, the coordinator listens on a port of loopback
    webhooks: Path | None = None
    engine: Callable[[int], EngineSetup] | None = None

    @property
    def address(self) -> str:
        if self.security is not None:
            return f"localhost:{self.server.port}"
        return f"unix:{self.home / 's'}"

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.home / "store")

    def open_store(self) -> ArtifactStore:
        """Return the messages that the coordinator passes on."""
        return self.store

    def base(self, text: str = "base") -> str:
        source = self.home / f"{text}.txt"
        source.write_text(text)
        return self.store.put_files({"text": source})  # read as the input of the first tasks

    def give(self, digest: str, *, project: str) -> None:
        """Give an artifact to a project, as if the project had pushed it."""
        coordinator = self.server.coordinator
        record = functools.partial(coordinator.database.ownership.record_artifact, project, digest)
        self.run(lambda: coordinator.journal.commit(record))

    def submit(self, record: ExportRecord) -> str:
        """Create an export from a record, past the planner."""
        self.run(lambda: self.server.coordinator.create(record))
        return record.name

    def run(self, make: Callable[[], Any]) -> Any:
        """Run a coroutine on the coordinator's loop."""
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(120)

    def finished(self, name: str) -> export_pb2.Export:
        """Wait for the end of the export and return it."""
        return list(watch(self.client, name))[-1]

    def __enter__(self) -> Harness:
        started: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), daemon=True)
        self._thread.start()
        started.result(120)
        if self.with_worker:  # requests to a coordinator without workers may fail
            wait_for(lambda: self.server.coordinator.broker.board.workers)
        self.client = Client(self.address)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _run(self, started: Future[None]) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        state = SqliteState(self.home / "state.db")
        options = {"workers_gone": True, **self.options}
        try:
            with hold_lock(lock_of(state)):
                self.server = CoordinatorServer(
                    CoordinatorOptions(state=state, **options),
                    address=self.address if self.security is None else "127.0.0.1:0",
                    store=self.open_store,
                    security=self.security,
                    webhooks=None if self.webhooks is None else WebhooksFile(self.webhooks),
                    engine=self.engine,
                )
                await self.server.start()
                started.set_result(None)
                await self._work()
                await self.server.stop()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _work(self) -> None:
        if not self.with_worker:
            await self._stop.wait()
            return
        machine = probe(self.home, self.stages)
        worker_options = WorkerOptions(self.address, self.stages, slots=2, report_seconds=0.1)
        self.worker = Worker(worker_options, TaskRunner(self.store, self.home / "scratch"), machine)
        running = asyncio.create_task(self.worker.run())
        await self._stop.wait()
        self.worker.stop()
        await running


@dataclass
class TinyStages:
    """A home with stages that do almost nothing and can be told to wait; see tests/support/tiny_stages."""

    home: Path

    def hold(self, stage: str) -> Path:
        """Let a stage wait until the file is removed."""
        path = self.home / f"hold-{stage}"
        path.touch()
        return path

    def runs(self) -> list[str]:
        """Return the actions of the stages so far."""
        path = self.home / "runs"
        return path.read_text().split() if path.exists() else []

    def sources(self) -> dict[str, str]:
        """Return digests of a base and an adapter in the home's store."""
        (self.home / "base").write_text("base")
        digest = LocalStore(self.home / "store").put_files({"base": self.home / "base"})
        return {"base": digest, "adapter": digest}


def watch(client: Client, name: str, *, after: int = 0) -> Iterator[export_pb2.Export]:
    """Yield the states of an export until it ends."""
    for event in client.watch_export(name, after_sequence=after):
        if event.WhichOneof("event") == "export":
            yield event.export


def states(export: export_pb2.Export) -> dict[str, str]:
    """Return the name of each task's state."""
    return {task.id: export_pb2.TaskState.Name(task.state)[11:].lower() for task in export.tasks}


def state(export: export_pb2.Export) -> str:
    """Return the name of the export's state."""
    return export_pb2.ExportState.Name(export.state)[13:].lower()


def wait_for(condition: Callable[[], Any], *, seconds: float = 60.0) -> Any:
    """Wait until the condition is true, and return its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


CONFIGURATION = parse({})


@contextmanager
def coordinator_process(home: Path, address: str, *, lease_seconds: float = 4.0) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``slipway coordinator`` until the block ends."""
    command = [SLIPWAY, "coordinator", "--listen", address, "--state", str(home / "state.db")]
    with process([*command, "--lease-seconds", str(lease_seconds)], home / "coordinator.log") as started:
        yield started


@contextmanager
def worker_process(home: Path, address: str, stages: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``slipway worker`` until the block ends."""
    command = [SLIPWAY, "worker", "--coordinator", address, "--stage", stages, "--slots", "1"]
    more = {"SLIPWAY_HOME": str(home), **environment}
    with process([*command, "--drain-seconds", "0"], home / "worker.log", **more) as started:
        yield started


@contextmanager
def process(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that ends with the block."""
    with log.open("ab") as out:
        # Not in the checkout: what is installed there as metadata would be found before everything else.
        environment = {**os.environ, **environment}
        started = subprocess.Popen(command, env=environment, cwd=log.parent, stdout=out, stderr=out)
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(60)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
