"""A state with coordinators and workers of several versions, which come and go; their stages do almost nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from google.protobuf.json_format import MessageToDict

from slipway.artifacts import LocalStore
from slipway.client import Client
from slipway.configuration import parse
from slipway.errors import ModelExportError
from slipway_coordinator.storage.database_access import state_at
from slipway_protos.v1 import export_pb2
from support.commands.cli import Done
from support.coordinators.harness import TinyStages, process, state, wait_for
from support.servers.free_ports import free_port
from support.upgrades.versions import Version

SETTINGS = parse(
    {
        "formats": {"onnx": {"enabled": False}},
        "optimization": {"quantization": "int8"},
        "validation": {"compare_outputs": False},
    }
)
STAGES = "merge,quantize,validate"
_START_SECONDS = 120


@dataclass
class Site(TinyStages):
    """A state, and what runs on it.

    Attributes:
        place: A file of SQLite, or the URL of a database.
        address: Where its coordinator listens.
    """

    place: str
    address: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")

    @contextmanager
    def coordinator(
        self, version: Version, *, address: str = "", kill: bool = False
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a coordinator until the block ends.

        Args:
            version: Its version.
            address: Where it listens, if not at :attr:`address`.
            kill: Whether it ends by ``SIGKILL``.
        """
        address = address or self.address
        words = ["--listen", address, "--state", self.place, "--lease-seconds", "10"]
        with self._process(version, "coordinator", *words) as started:
            with Client(address) as client:
                wait_for(lambda: _answers(client) or started.poll() is not None, seconds=_START_SECONDS)
            assert started.poll() is None, self.log(version, "coordinator")
            yield started
            if kill:
                started.kill()
                started.wait()

    @contextmanager
    def worker(self, version: Version, *, stages: str = STAGES, address: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker of this version's stages until the block ends."""
        words = ["--coordinator", address or self.address, "--stage", stages, "--slots", "1", "--drain-seconds", "0"]
        with self._process(version, "worker", *words) as started:
            yield started

    def refused(self, version: Version) -> Done:
        """Start a coordinator that is to end by itself."""
        words = ("coordinator", "--listen", self.address, "--state", self.place)
        return version.run(*words, home=self.home, timeout=_START_SECONDS)

    def migrate(self, version: Version) -> Done:
        """Bring the tables up to date for a version, as documented."""
        return version.run("coordinator", "migrate", "--state", self.place, home=self.home)

    def create(self, client: Client, export_id: str, **options: Any) -> export_pb2.Export:
        """Create an export of sources of its own, so that it reuses no results of another one."""
        text = self.home / f"source-{export_id}"
        text.write_text(export_id)
        digest = LocalStore(self.home / "store").put_files({"base": text})
        sources = {"base": digest, "adapter": digest}
        return client.create_export(SETTINGS, sources=sources, export_id=export_id, **options)

    def fail(self, stage: str) -> Path:
        """Let a stage fail until the file is removed."""
        path = self.home / f"fail-{stage}"
        path.touch()
        return path

    def log(self, version: Version, service: str) -> str:
        """Return what the processes of a version have logged."""
        path = self.home / f"{service}-{version.name}.log"
        return path.read_text() if path.exists() else ""

    def rows(self) -> dict[str, list[str]]:
        """Return all rows of the state's tables, the workflow engine's too."""
        engine = sa.create_engine(state_at(self.place).url)
        try:
            with engine.connect() as connection:
                tables = _tables(sa.inspect(connection))
                return {
                    name: sorted(map(repr, connection.execute(sa.text(f"SELECT * FROM {name}")).all()))
                    for name in tables
                }
        finally:
            engine.dispose()

    @contextmanager
    def _process(self, version: Version, service: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        environment = version.environment(self.home, tiny=True, SLIPWAY_TEST_STAGES=str(self.home))
        log = self.home / f"{service}-{version.name}.log"
        with process([version.command, service, *words], log, **environment) as started:
            yield started


def _answers(client: Client) -> bool:
    try:
        list(client.list_exports(page_size=1))
    except ModelExportError as error:
        assert error.reason == "COORDINATOR_UNAVAILABLE", error
        return False
    return True


def _tables(inspector: sa.Inspector) -> list[str]:
    kept = [each for each in inspector.get_schema_names() if each not in {"information_schema", "temp"}]
    return [f'"{schema}"."{table}"' for schema in kept for table in inspector.get_table_names(schema)]


def exports_of(client: Client) -> dict[str, export_pb2.Export]:
    """Return all exports by id."""
    return {each.name.rpartition("/")[2]: each for each in client.list_exports()}


def finished(client: Client, export_id: str) -> export_pb2.Export:
    """Wait for the end of an export and return it."""

    def ended() -> export_pb2.Export | None:
        export = client.get_export(export_id)
        return export if state(export) in {"succeeded", "failed", "cancelled"} else None

    found: export_pb2.Export = wait_for(ended, seconds=200)
    return found


def document(export: export_pb2.Export) -> Mapping[str, Any]:
    """Return an export as plain data."""
    return MessageToDict(export, preserving_proto_field_name=True)


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Return the places where data lacks what it had before; it may have more."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return [
            place
            for name, value in before.items()
            for place in (lost(value, after[name], f"{path}.{name}") if name in after else [f"{path}.{name}"])
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [place for number, (old, new) in pairs for place in lost(old, new, f"{path}[{number}]")]
    return [] if before == after else [f"{path}: {before!r} became {after!r}"]
