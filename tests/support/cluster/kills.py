"""Send ``kill -9`` at moments chosen by an export's progress and a seed, and record the killed processes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil

from slipway_protos.v1 import export_pb2
from support.cluster.cluster import Cluster
from support.coordinators.harness import state, states

KINDS = ("coordinator", "worker", "child")

_LONGEST_DELAY = {"coordinator": 1.2, "worker": 0.8, "child": 0.3}
_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Kill:
    """A living process that was killed.

    Attributes:
        kind: One of :data:`KINDS`.
        pid: Its id.
        stage: The stage that ran at that moment; for a worker or child, in it.
        delay: Seconds after the task was first seen running.
    """

    kind: str
    pid: int
    stage: str
    delay: float

    def __str__(self) -> str:
        return f"{self.kind} in {self.stage} +{self.delay:.2f} s"


@dataclass(frozen=True)
class Run:
    """An export that was disturbed and gave the right result."""

    seed: int
    kills: tuple[Kill, ...]
    attempts: int
    seconds: float


RUNS: list[Run] = []


def table() -> Iterator[str]:
    """Yield a readable summary of all runs so far."""
    for run in RUNS:
        kills = ", ".join(str(kill) for kill in run.kills)
        yield f"seed {run.seed:>3}  {run.seconds:5.1f} s  {run.attempts} attempts  {kills}"
    kills_by_kind = {kind: sum(kill.kind == kind for run in RUNS for kill in run.kills) for kind in KINDS}
    stages = {kill.stage for run in RUNS for kill in run.kills}
    counts = ", ".join(f"{count} of a {kind}" for kind, count in kills_by_kind.items())
    yield f"{len(RUNS)} exports, kills: {counts}; during {', '.join(sorted(stages))}"


def strike(cluster: Cluster, name: str, *, kind: str, chance: random.Random) -> Kill | None:
    """Kill a process of a kind shortly after a task starts; return None if the export ended before one ran.

    The seed chooses the task and the delay; if that task ends too soon, another one is chosen.
    """
    delay, wanted = chance.uniform(0, _LONGEST_DELAY[kind]), ""
    while True:
        time.sleep(_LOOK_SECONDS)
        export = cluster.look(name)
        if export is None:
            continue
        open_tasks = [task for task, now in states(export).items() if now in {"waiting", "queued", "running"}]
        if not open_tasks or state(export) not in {"queued", "running"}:
            return None
        # The last task only if there is no other: no task follows on which to fall back.
        wanted = wanted if wanted in open_tasks else chance.choice(open_tasks[:-1] or open_tasks)
        task = next(task for task in export.tasks if task.id == wanted)
        if task.state != export_pb2.TASK_STATE_RUNNING or (kind == "child" and not _children(cluster, task)):
            continue
        time.sleep(delay)
        pid = _kill(cluster, name, task, kind=kind)
        if pid:
            return Kill(kind, pid, task.stage, delay)
        delay = 0.0  # too late for this one: the next at once


def _kill(cluster: Cluster, name: str, task: export_pb2.Task, *, kind: str) -> int:
    """Kill a running process; return 0 if there is none."""
    if kind == "coordinator":
        active = cluster.active()
        return active.kill() if active is not None else 0
    if kind == "worker":
        export = cluster.look(name)
        if export is None or states(export)[task.id] != "running":
            return 0
        worker = cluster.running_on(task.attempts[-1].worker)
        return worker.kill() if worker is not None else 0
    for child in _children(cluster, task):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                child.kill()
                assert not psutil.wait_procs([child], timeout=60)[1], "it outlives SIGKILL"
                return child.pid
    return 0


def _children(cluster: Cluster, task: export_pb2.Task) -> list[psutil.Process]:
    worker = cluster.running_on(task.attempts[-1].worker)
    return worker.children() if worker is not None else []
