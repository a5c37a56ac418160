"""The contract with engines, which run tasks on a cluster that has a scheduler of its own, such as Ray.

The coordinator decides what runs; an engine decides where and when. A *submission* is one attempt of one task. For each the engine starts a
worker of its own, ``slipway worker --once ATTEMPT``, which takes that attempt from the coordinator, runs it, hands the result in and ends.
So leases, progress, logs, results, artifacts, traces and recovery are the same on every engine, and the same as with workers that pull.
An engine says only what such a worker cannot say itself: that its node was lost, for example, or that no node can run it.

A distribution brings an :class:`EngineService` under the entry point group ``slipway.engines``; finding it imports none of the engine's
libraries. The broker's side is :mod:`slipway_coordinator.broker.submitter`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from pydantic import SecretStr

from slipway.distribution import installed_entry_points
from slipway.errors import ConfigurationError
from slipway.requirements import ANY, Requirements
from slipway.texts import quoted

GROUP = "slipway.engines"

WORKER_SEPARATOR = "."
"""Ends a submission's id in the name of its worker; no id contains it."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One attempt of one task.

    Attributes:
        id: Its name at the engine: at most 63 lower-case letters, digits and ``-``. Submitting the same id again is the same submission.
        attempt: Key of the attempt, ``{export}:{task}:{attempt}``.
        stage: Name of its stage.
        project: Project of its export.
        export: Name of its export.
        priority: A higher one should start first.
        requirements: What it needs of a node, and what it prefers.
        threads: Threads that it may use; 0 if the node decides.
        memory_bytes: Memory that it is known to need; 0 if unknown.
        disk_bytes: Disk for its work folder: what it fetches, and as much again for what it makes, of which a part of divided work makes its share.
        inputs: Bytes that it fetches of its inputs by digest.
        near: Nodes that made these inputs and may still have them, most bytes first, by :attr:`SubmissionReport.node`.
    """

    id: str
    attempt: str
    stage: str
    project: str
    export: str
    priority: int = 0
    requirements: Requirements = ANY
    threads: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    inputs: Mapping[str, int] = field(default_factory=dict)
    near: tuple[str, ...] = ()


class SubmissionEnd(StrEnum):
    """How a submission ended.

    EXITED: its worker ended by itself; what became of the attempt is known from the worker. The others are for attempts of which the worker
    handed nothing in. FAILED: the worker could not be started, or ended with an error. PREEMPTED: its node was given to others, as spot
    nodes are. NODE_LOST: its node died, or the whole cluster. OUT_OF_MEMORY: the cluster ended it for its memory. UNSCHEDULABLE: no node
    can run it. CANCELLED: :meth:`Engine.cancel` ended it.
    """

    EXITED = "exited"
    FAILED = "failed"
    PREEMPTED = "preempted"
    NODE_LOST = "node_lost"
    OUT_OF_MEMORY = "out_of_memory"
    UNSCHEDULABLE = "unschedulable"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SubmissionReport:
    """The state of a submission at its engine.

    Attributes:
        id: The submission.
        attempt: Key of its attempt.
        node: Name of the node that runs it, or ran it; empty while it waits.
        end: How it ended; None while it waits or runs.
        message: For people: why it waits, or ended.
        link: Address of the engine's own page about it; empty if there is none.
    """

    id: str
    attempt: str
    node: str = ""
    end: SubmissionEnd | None = None
    message: str = ""
    link: str = ""


class Engine(Protocol):
    """Runs submissions of one coordinator. All methods run on one event loop."""

    async def start(self) -> None:
        """Connect to the cluster, and check that its nodes can run workers of this coordinator.

        Raises:
            ModelExportError: ``ENGINE_UNAVAILABLE`` or ``ENGINE_UNFIT``.
        """

    async def adopt(self) -> Sequence[SubmissionReport]:
        """Return the submissions that an earlier process of this coordinator left, and watch them like those of this one."""

    async def submit(self, submission: Submission) -> None:
        """Run a submission as soon as there is room. Return at once; how it ends, and that it cannot be run, is a report."""

    async def cancel(self, submission_id: str) -> None:
        """End a submission within five seconds, wherever it is; harmless if it has ended. Its end is a report."""

    def watch(self) -> AsyncIterator[SubmissionReport]:
        """Yield a report whenever a submission changes, its end as the last one. One reader at a time."""

    async def stop(self) -> None:
        """Disconnect. Submissions go on, for the next process to adopt; whoever wants them to end cancels them before."""


def is_worker_of(worker: str, submission_id: str) -> bool:
    """Return whether a worker, by its name at the coordinator, was started for a submission."""
    return worker.rpartition("/")[2].partition(WORKER_SEPARATOR)[0] == submission_id


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """How an engine starts the worker of a submission.

    Attributes:
        owner: Name of the coordinator at the engine: the same after its restart, and different from others'.
        coordinator: ``HOST:PORT`` at which the nodes reach the coordinator; empty if their own settings say it.
        store: Where the nodes find the artifacts: a folder, or ``s3://bucket/prefix``.
        environment: Variables of the worker, with which it finds the store and shows the coordinator who it is; some are secrets.
        files: Contents of files that a node has to write before, by the variable that names each to the worker.
        mark: Name of a file in the folder of the store, which nodes that see the folder see; empty with S3.
    """

    owner: str
    coordinator: str
    store: str
    environment: Mapping[str, SecretStr] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    mark: str = ""

    def arguments(self, submission: Submission) -> list[str]:
        """Return the arguments of the program ``slipway`` that run a submission's worker."""
        place = ["--coordinator", self.coordinator] if self.coordinator else []
        named = [*place, "--stage", submission.stage, "--once", submission.attempt, "--submission", submission.id]
        return ["worker", *named, "--drain-seconds", "0"]


@dataclass(frozen=True, slots=True)
class EngineService:
    """What a distribution brings for an engine.

    Attributes:
        open: Returns the engine for an address, which may be empty, and the start of its workers.
        check: Checks the same address, and that the engine's libraries are installed, before anything is started. It raises a
            ``ModelExportError``.
        has_templates: The cluster has templates of workers, with the coordinator's address, the store and credentials. So a coordinator that
            is a process of its own gives the engine none of these.
        installation: Returns a name that tells this installation from others of one cluster whose states have one name, too; empty if no
            such name is set.
    """

    open: Callable[[str, WorkerStart], Engine]
    check: Callable[[str], None]
    has_templates: bool = False
    installation: Callable[[], str] = str


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine that ``NAME`` or ``NAME:ADDRESS`` chooses."""

    service: EngineService
    name: str
    address: str

    @classmethod
    def parse(cls, text: str) -> EngineChoice | None:
        """Find the engine of a text; None of ``pull``, or an empty one: workers that pull need no engine.

        Raises:
            ConfigurationError: ``ENGINE_UNKNOWN``.
        """
        name, _, address = text.partition(":")
        if name in {"", PULL}:
            return None
        entries = installed_entry_points(GROUP)
        try:
            service = entries[name].load()
        except (KeyError, ImportError, AttributeError) as error:
            why = f": {type(error).__name__}: {error}" if name in entries.names else ""
            raise ConfigurationError(
                f"there is no engine {quoted(name)}{why}",
                reason="ENGINE_UNKNOWN",
                remedy=f"engines here are {', '.join((PULL, *sorted(entries.names)))}",
                about={"engine": name},
            ) from error
        return cls(service, name, address)


PULL = "pull"
"""Stands for workers that pull their tasks, which need no engine."""
