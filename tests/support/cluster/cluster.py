"""A whole cluster on this machine: two coordinators, workers, PostgreSQL and S3, each a process that may be killed.

Processes that end are started again, as Kubernetes does, and the coordinators have one address, which leads to each of them in
turn.
"""

from __future__ import annotations

import http.client
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from slipway.artifacts import ArtifactStore
from slipway.artifacts.manifest import Manifest
from slipway.artifacts.opening import open_store
from slipway.client import Client
from slipway.configuration import parse
from slipway.errors import ModelExportError
from slipway.settings import Settings
from slipway_protos.v1 import export_pb2
from support import TINY_STAGES
from support.commands.child_processes import owned
from support.commands.cli import SLIPWAY
from support.coordinators.harness import state, wait_for
from support.servers.free_ports import free_port
from support.servers.postgres_server import PostgresServer
from support.servers.s3_server import BUCKET, S3Server
from support.servers.tcp_proxy import Target, TcpProxy

CONFIGURATION = parse({"optimization": {"quantization": "int8"}})
_RESTART_SECONDS = 0.3
_TINY = "merge,calibration_data,calibrate,quantize,onnx_export,reference,validate"


@dataclass(eq=False)
class Member:
    """A process that is started again when it ends, unless it was stopped.

    Attributes:
        name: Also of its log.
        command: How it is started.
        environment: Beside this process's own.
        folder: Where its log lies.
        port: Where it serves; 0 when nobody needs to know.
        metrics: Port of its metrics; 0 for none.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    folder: Path
    port: int = 0
    metrics: int = 0
    wanted: bool = False
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._disown()
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env={**os.environ, **self.environment}, cwd=self.folder, stdout=log, stderr=log
            )
        owned.add(self.process.pid)
        self.wanted = True
        self.starts += 1

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> int:
        """End it at once, which comes back by itself; answers the id of the process, which ran until then."""
        victim = self.process
        assert victim is not None
        victim.kill()
        assert victim.wait(60) == -signal.SIGKILL, f"{self.name} was gone already"
        return victim.pid

    def stop(self) -> None:
        """End it in order, for good."""
        self.wanted = False
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._disown()

    def _disown(self) -> None:
        if self.process is not None:
            owned.discard(self.process.pid)

    @property
    def home(self) -> Path:
        """Folder of its work in progress."""
        return Path(self.environment["SLIPWAY_HOME"])

    def children(self) -> list[psutil.Process]:
        """Return the processes that it started: stages."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True) if self.process else []
            return [child for child in found if "slipway.execution.child_main" in child.cmdline()]
        except psutil.Error:
            return []

    def log(self) -> str:
        path = self.folder / f"{self.name}.log"
        return path.read_text() if path.exists() else ""


@dataclass
class Cluster:
    """Everything; a context in which it runs.

    Args:
        folder: Empty.
        postgres: A running server.
        s3: A running server.
        tiny: Whether the stages are those of ``tiny_stages``, not all that are installed.
        seconds: How long each of these takes.
        workers: How many there are.
        lease_seconds: Silence after which a worker is given up.
        endpoint: Where everybody finds S3, if not at the server itself.
        texts: What its exports were made from.
    """

    folder: Path
    postgres: PostgresServer
    s3: S3Server
    tiny: bool = True
    seconds: float = 0.3
    workers: int = 3
    lease_seconds: float = 3.0
    endpoint: str = ""
    texts: list[str] = field(default_factory=list)
    coordinators: list[Member] = field(default_factory=list)
    running: list[Member] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)
    _active: Member | None = None
    _turns: Iterator[int] = field(default_factory=itertools.count)
    _manifests: dict[str, Manifest] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Cluster:
        self.database = self.postgres.create(f"c{os.getpid()}_{time.monotonic_ns()}")
        migration = [SLIPWAY, "coordinator", "migrate", "--state", self.database]
        subprocess.run(migration, check=True, capture_output=True, cwd=self.folder)
        with ExitStack() as stack:
            self.coordinators = [self._coordinator(f"coordinator-{name}") for name in "ab"]
            for member in self.coordinators:
                stack.callback(member.stop)
                member.start()
            self.service = stack.enter_context(TcpProxy(self._target))
            watching = threading.Thread(target=self._look_after, daemon=True)
            watching.start()
            stack.callback(watching.join)
            stack.callback(self._ended.set)
            for number in range(self.workers):
                stack.callback(self.worker(f"worker-{number}", self.service.address).stop)
            self.client = stack.enter_context(Client(self.service.address))
            self.all_back()  # a standby that does not listen yet would refuse every second connection
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._stack.close()

    # Parts

    def worker(
        self, name: str, coordinator: str, *, prefix: tuple[str, ...] = (), stages: str = "", **environment: str
    ) -> Member:
        """Start a worker of these stages; by default of all that the cluster has."""
        command = [*prefix, SLIPWAY, "worker", "--coordinator", coordinator, "--slots", "1"]
        command += ["--drain-seconds", "5"]
        stages = stages or (_TINY if self.tiny else "")
        if stages:
            command += ["--stage", stages]
        member = Member(name, command, {**self.environment(name), **environment}, self.folder)
        self.running.append(member)
        member.start()
        return member

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of the worker or command of this name: the common store and its own home."""
        environment = {
            **self.s3.environment(),
            "SLIPWAY_STORE": f"s3://{BUCKET}/{self.folder.name}",
            "SLIPWAY_HOME": str(self.folder / name),
        }
        if self.endpoint:
            environment["AWS_ENDPOINT_URL"] = self.endpoint
        if self.tiny:
            environment |= {
                "PYTHONPATH": os.pathsep.join([str(TINY_STAGES), os.environ["PYTHONPATH"]]),
                "SLIPWAY_TEST_STAGES": str(self.folder),
                "SLIPWAY_TEST_SECONDS": str(self.seconds),
            }
        return environment

    def store(self) -> ArtifactStore:
        """Open the common store without its cache on this machine."""
        name = f"reader-{time.monotonic_ns()}"
        return open_store(Settings.from_environment(self.environment(name)))

    def manifest(self, digest: str) -> Manifest:
        """Return the files of an artifact in the store."""
        if digest not in self._manifests:
            self._manifests[digest] = self.store().manifest(digest)
        return self._manifests[digest]

    def active(self) -> Member | None:
        """Return the active coordinator."""
        return self._active

    def standby(self) -> Member:
        """Return the coordinator that is not active."""
        return next(member for member in self.coordinators if member is not self._active)

    def running_on(self, worker_id: str) -> Member | None:
        """Return the worker of this id, unless it was restarted since."""
        pid = worker_id.split("-")[-2] if worker_id.count("-") >= 2 else ""
        return next((m for m in self.running if m.process is not None and str(m.process.pid) == pid), None)

    def working(self) -> list[Member]:
        """Return the workers that run a stage now."""
        return [member for member in self.running if member.children()]

    def all_back(self) -> None:
        """Wait until all members run, all coordinators listen, as a Service's ready pods do, and one of them serves."""
        members = [*self.coordinators, *self.running]
        wait_for(
            lambda: self.active() and all(m.process and m.process.poll() is None for m in members if m.wanted),
            seconds=120,
        )
        wait_for(lambda: all(_listens(member) for member in self.coordinators if member.wanted), seconds=120)

    # Exports

    def create(self, text: str) -> str:
        """Start an export of a base with this content; return its name."""
        digest = self._put(text)
        self.texts.append(text)
        return self.client.create_export(
            CONFIGURATION, sources={"base": digest, "adapter": digest}, request_id=text, export_id=text
        ).name

    def look(self, name: str) -> export_pb2.Export | None:
        """Return the export now, if a coordinator serves."""
        try:
            return self.client.get_export(name)
        except ModelExportError as error:
            assert error.reason == "COORDINATOR_UNAVAILABLE", error
            return None

    def finished(self, name: str, *, seconds: float = 200.0) -> export_pb2.Export:
        """Wait for the end of the export, through failures of the coordinator, and return it."""

        def ended() -> export_pb2.Export | None:
            export = self.look(name)
            return export if export is not None and state(export) in {"succeeded", "failed", "cancelled"} else None

        return wait_for(ended, seconds=seconds)

    def logs(self) -> str:
        """Return the end of every process's log."""
        return "\n".join(f"--- {m.name}\n{m.log()[-3000:]}" for m in [*self.coordinators, *self.running])

    def _put(self, text: str) -> str:
        source = self.folder / f"base-{text}"
        source.write_text(text)
        return self.store().put_files({"text": source})

    def _coordinator(self, name: str) -> Member:
        port, metrics = free_port(), free_port()
        command = [SLIPWAY, "coordinator", "--listen", f"127.0.0.1:{port}"]
        command += ["--state", self.database, "--lease-seconds", str(self.lease_seconds)]
        command += ["--metrics", f"127.0.0.1:{metrics}"]
        return Member(name, command, {}, self.folder, port=port, metrics=metrics)

    def _target(self) -> Target:
        """Return the coordinators in turn, as a Kubernetes Service does with all ready pods; a standby redirects to the active one."""
        running = [m for m in self.coordinators if m.process is not None and m.process.poll() is None]
        chosen = running or self.coordinators
        return ("127.0.0.1", chosen[next(self._turns) % len(chosen)].port)

    def _look_after(self) -> None:
        """Restart all members that ended, and find the active coordinator."""
        ended: dict[str, float] = {}
        while not self._ended.wait(0.05):
            for member in [*self.coordinators, *self.running]:
                if member.wanted and member.process is not None and member.process.poll() is not None:
                    since = ended.setdefault(member.name, time.monotonic())
                    if time.monotonic() - since > _RESTART_SECONDS:
                        del ended[member.name]
                        member.start()
            self._active = next((member for member in self.coordinators if _is_active(member)), None)


def _listens(member: Member) -> bool:
    try:
        socket.create_connection(("127.0.0.1", member.port), timeout=2).close()
    except OSError:
        return False
    return True


def _is_active(member: Member) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{member.metrics}/metrics", timeout=2) as page:
            return b"slipway_coordinator_active 1.0" in page.read()
    except (OSError, http.client.HTTPException):
        return False
