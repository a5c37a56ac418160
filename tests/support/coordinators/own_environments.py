"""A coordinator and workers as processes of this machine; a stage whose extra has an environment of its own is run from there, alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

from slipway.client import Client
from slipway.errors import ModelExportError
from support.commands.cli import SLIPWAY
from support.coordinators.harness import process, wait_for
from support.servers.free_ports import free_port

VARIABLE = "SLIPWAY_TEST_ENVIRONMENTS"
"""Names a folder with an environment per extra: ``FOLDER/litert/bin/slipway`` after ``pip install slipway-ml[litert]``."""


def own_environments() -> dict[str, Path]:
    """Return the commands of the environments by the stage, whose extra has its name."""
    folder, stages = os.environ.get(VARIABLE), entry_points(group="slipway.stages").names
    commands = Path(folder).glob("*/bin/slipway") if folder else ()
    return {command.parents[1].name: command for command in sorted(commands) if command.parents[1].name in stages}


@dataclass
class Site:
    """A coordinator, and workers by the name of the stage that only they have.

    Attributes:
        address: Of the coordinator.
        workers: Process of each worker; that of the other stages is named "shared".
    """

    address: str
    workers: dict[str, int] = field(default_factory=dict)

    def ran(self, export: str) -> dict[str, set[str]]:
        """Return the workers that ran each stage of an export."""
        names, found = {str(pid): name for name, pid in self.workers.items()}, dict[str, set[str]]()
        with Client(self.address) as client:
            for task in client.get_export(export).tasks:
                ran = {names[each.worker.split("-")[-2]] for each in task.attempts if not each.reused}
                found.setdefault(task.stage, set()).update(ran)
        return found


@contextmanager
def site_of(folder: Path, commands: dict[str, Path]) -> Iterator[Site]:
    """Start a coordinator, a worker of each command, and one of this environment for all other stages."""
    site = Site(f"127.0.0.1:{free_port()}")
    store = {"SLIPWAY_STORE": str(folder / "store")}
    others = ",".join(sorted(entry_points(group="slipway.stages").names - commands.keys()))
    with ExitStack() as stack:
        serve = [SLIPWAY, "coordinator", "--listen", site.address, "--state", str(folder / "state.db")]
        stack.enter_context(
            process(serve, folder / "coordinator.log", SLIPWAY_HOME=str(folder / "coordinator"), **store)
        )
        wait_for(lambda: _answers(site.address), seconds=120)
        for name, command in {**{name: str(path) for name, path in commands.items()}, "shared": SLIPWAY}.items():
            words = [command, "worker", "--coordinator", site.address, "--slots", "1", "--drain-seconds", "0"]
            words += ["--stage", others if name == "shared" else name]
            home = {"SLIPWAY_HOME": str(folder / f"home-of-{name}"), "PYTHONPATH": ""}
            log = folder / f"worker-{name}.log"
            site.workers[name] = stack.enter_context(process(words, log, **home, **store)).pid
        yield site


def _answers(address: str) -> bool:
    with Client(address) as client:
        try:
            return list(client.list_artifacts()) == []
        except ModelExportError:
            return False
