"""Hands attempts that wait to an engine, and ends those of which the engine lost the worker.

The board stays the only place that knows what should run. Again and again it is compared with the submissions: an attempt that waits and
has none is submitted, and a submission whose attempt is not wanted any more is cancelled. So nothing has to be stored: after a restart
the engine is asked what it still has, and the workers report what they run.

A submission's id is made from its attempt and a number that counts up, so a repeated call of the engine is the same submission. Projects take
turns, and few submissions wait at the engine at a time: otherwise those of a large export would be in its queue before all others'.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from slipway.artifacts.manifest import Manifest
from slipway.contracts.engine import Engine, Submission, SubmissionEnd, SubmissionReport
from slipway.errors import Failure, ModelExportError, ServiceError, StageError
from slipway.observability.telemetry import within
from slipway.planning.references import AttemptKey
from slipway_coordinator.broker.broker import Broker
from slipway_coordinator.broker.shares import Shares
from slipway_coordinator.lifecycle.offers import Offer
from slipway_coordinator.storage.events import Hub
from slipway_protos.v1 import export_pb2

log = logging.getLogger("slipway.coordinator.broker")

_LOOK_SECONDS = 1.0
_STRAY_SECONDS = 60.0
"""How long a submission of an earlier process may have no export: exports are resumed one after another."""
_EXIT_SECONDS = 10.0
"""How long a worker may take to end after its result."""
_MOST_STARTS = 3
"""Workers in a row of an attempt that may end before they took it."""
_MOST_SIZES = 10_000
MOST_WAITING = 32
"""Submissions that may wait at the engine."""

_END = SubmissionEnd
_FOLDER_SIZES = 2  # a work folder holds the inputs, and outputs of about their size


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The engine of a coordinator.

    Attributes:
        name: Its name, for people.
        engine: The engine.
        owner: Name of the coordinator at the engine.
        cancels_at_stop: End all submissions when the coordinator stops, because no later process adopts them at once.
    """

    name: str
    engine: Engine
    owner: str
    cancels_at_stop: bool = False


ReadManifest = Callable[[str], Manifest]
"""Reads the manifest of an artifact from the store; blocks."""


@dataclass
class _Submitted:
    """A submission that has not ended. ``unwanted_since`` is by :func:`time.monotonic`; 0 while its attempt is wanted."""

    id: str
    attempt: AttemptKey
    message: str = ""
    adopted: bool = False
    cancelled: bool = False
    unwanted_since: float = 0.0


class Submitter:
    """Submits the attempts of one coordinator to one engine. All methods run on one event loop.

    Args:
        broker: Offers and leases.
        setup: The engine.
        hub: Shows watchers where their tasks run and why they wait.
        manifests: Measures inputs.
    """

    def __init__(self, broker: Broker, setup: EngineSetup, hub: Hub, manifests: ReadManifest) -> None:
        self._broker, self._board, self._engine, self._setup = broker, broker.board, setup.engine, setup
        self._hub, self._manifests = hub, manifests
        self._sizes: dict[str, int] = {}  # of inputs, by digest
        self._board.engine = setup.name
        self._submitted: dict[AttemptKey, _Submitted] = {}
        self._numbers: dict[AttemptKey, int] = {}  # of the last submission of each attempt
        self._starts = Counter[AttemptKey]()  # submissions in a row that ended before a lease
        self._nodes: dict[AttemptKey, str] = {}  # where attempts of present exports run or ran
        self._shares = Shares()
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect to the engine, and begin to submit.

        Raises:
            ModelExportError: As :meth:`~slipway.contracts.engine.Engine.start`.
        """
        await self._engine.start()
        self._running = asyncio.create_task(self._run(), context=contextvars.Context())

    async def stop(self) -> None:
        """Submit nothing more, and disconnect from the engine."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._setup.cancels_at_stop:
            await asyncio.gather(*(self._engine.cancel(one.id) for one in self._submitted.values()))
        await self._engine.stop()

    async def _run(self) -> None:
        try:
            await self._keep_submitting()
        except Exception:  # nothing else would say why tasks wait
            log.exception(f"the engine {self._setup.name} is not used any more")
            raise

    async def _keep_submitting(self) -> None:
        for report in await self._engine.adopt():
            self._adopt(report)
        watching = asyncio.create_task(self._watch())
        try:
            while not watching.done():
                try:
                    await self._look()
                except ServiceError as error:
                    log.warning(f"tasks cannot be submitted now: {error}")
                await self._broker.wait_for_change(_LOOK_SECONDS)
            await watching
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def _adopt(self, report: SubmissionReport) -> None:
        key = AttemptKey.parse(report.attempt)
        number = _number_of(report.id)
        if number > self._numbers.get(key, 0):
            log.info(f"adopted submission {report.id} of {key}")
            self._numbers[key] = number
            self._submitted[key] = _Submitted(report.id, key, adopted=True)
            self._nodes[key] = report.node

    async def _look(self) -> None:
        """Compare what is wanted with what is submitted."""
        present = self._board.wanted
        self._nodes = {
            key: node for key, node in self._nodes.items() if key.export in present or key in self._submitted
        }
        for one in list(self._submitted.values()):
            if not one.cancelled and self._is_over(one):
                one.cancelled = True
                await self._engine.cancel(one.id)
        for offer in self._due():
            await self._submit(offer)

    def _is_over(self, one: _Submitted) -> bool:
        """Return whether a submission has to be cancelled. A worker that has handed its result in ends by itself."""
        now, wanted = time.monotonic(), self._board.wanted.get(one.attempt.export)
        if self._board.is_wanted(one.attempt):
            one.unwanted_since = 0.0
            return False
        if wanted is not None and one.attempt in wanted.revoked:
            return True
        one.unwanted_since = one.unwanted_since or now
        if one.attempt in self._nodes:
            patience = _STRAY_SECONDS if one.adopted and wanted is None else _EXIT_SECONDS
            return now - one.unwanted_since > patience
        return True

    def _due(self) -> Iterator[Offer]:
        """Yield the attempts to submit now: projects take turns, and in each the higher priority goes first, then the oldest."""
        waiting, room = self._board.waiting, MOST_WAITING - self._count_waiting()
        now, importing, weight = time.time(), self._board.importing(), self._broker.projects().weight
        ready: dict[str, list[Offer]] = {}
        for key, offer in waiting.items():  # the oldest first
            if key not in self._submitted and offer.not_before <= now and not waiting.is_held_back(key, importing):
                ready.setdefault(offer.project, []).append(offer)
        for offers in ready.values():
            offers.sort(key=lambda offer: -offer.priority)
        running = Counter(key.project for key in self._submitted)
        while room > 0 and ready:
            project = next(self._shares.order(ready.keys(), running, weight))
            self._shares.charge(project, weight(project))
            running[project] += 1
            room -= 1
            yield ready[project].pop(0)
            if not ready[project]:
                del ready[project]

    def _count_waiting(self) -> int:
        return sum(key in self._board.waiting for key in self._submitted)

    async def _submit(self, offer: Offer) -> None:
        sizes = await self._measure(offer.call.inputs.values())
        if offer.key not in self._board.waiting:
            return
        number = self._numbers[offer.key] = self._numbers.get(offer.key, 0) + 1
        submission = Submission(
            id=submission_id(self._setup.owner, offer.key, number),
            attempt=str(offer.key),
            stage=offer.stage,
            project=offer.project,
            export=offer.export,
            priority=offer.priority,
            requirements=offer.requirements,
            threads=offer.call.limits.threads,
            memory_bytes=_known_memory(offer),
            disk_bytes=_FOLDER_SIZES * sum(sizes.values()),
            inputs=sizes,
            near=self._nodes_near(offer.export, sizes),
        )
        self._submitted[offer.key] = _Submitted(submission.id, offer.key)
        await self._engine.submit(submission)
        with within(offer.traceparent):
            log.info(f"submitted {offer.key} to {self._board.engine} as {submission.id}")

    async def _measure(self, digests: Collection[str]) -> dict[str, int]:
        """Return the bytes of artifacts by digest, of those that can be read."""
        while len(self._sizes) > _MOST_SIZES:
            del self._sizes[next(iter(self._sizes))]
        for digest in set(digests) - self._sizes.keys():
            with contextlib.suppress(ModelExportError, OSError):  # the task itself will report it
                self._sizes[digest] = (await asyncio.to_thread(self._manifests, digest)).size_bytes
        return {digest: self._sizes[digest] for digest in sorted(set(digests)) if digest in self._sizes}

    def _nodes_near(self, export: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return the nodes that made a task's inputs, most bytes first."""
        made_by, bytes_at = self._board.wanted[export].made_by, Counter[str]()
        for digest, size in sizes.items():
            maker = made_by.get(digest)
            if maker in self._nodes:
                bytes_at[self._nodes[maker]] += size
        return tuple(node for node, _ in bytes_at.most_common())

    # Reports of the engine

    async def _watch(self) -> None:
        async for report in self._engine.watch():
            try:
                await self._note(report)
            except ModelExportError as error:
                log.warning(f"a report of the engine on {report.attempt} is lost: {error}")
            except Exception:  # if this loop ended, no later report would be read
                log.exception(f"a report of the engine on {report.attempt} cannot be used")

    async def _note(self, report: SubmissionReport) -> None:
        key = AttemptKey.parse(report.attempt)
        one = self._submitted.get(key)
        if one is None or one.id != report.id:
            return
        if report.end is None:
            await self._note_place(one, report)
            return
        del self._submitted[key]
        await self._note_end(one, report)
        await self._look()

    async def _note_place(self, one: _Submitted, report: SubmissionReport) -> None:
        """Tell watchers on which node a task runs, or why it waits, once each."""
        message = " ".join(filter(None, (f"runs on {report.node}" if report.node else report.message, report.link)))
        if message and message != one.message:
            level = "info" if report.node else "warning"
            text = f"{one.attempt.task} {'' if report.node else 'waits: '}{message}"
            line = export_pb2.LogLine(task=one.attempt.task, level=level, message=text)
            await self._hub.publish(one.attempt.export, line)
        one.message = message
        if report.node:
            self._nodes[one.attempt] = report.node

    async def _note_end(self, one: _Submitted, report: SubmissionReport) -> None:
        key, end = one.attempt, report.end
        if not self._board.is_wanted(key):
            self._starts.pop(key, None)
            self._numbers.pop(key, None)
            await self._broker.end_lost(key, departed=True, why="was ended by its engine")  # if it was revoked
            return
        why = f"was lost by {self._board.engine} ({end}{': ' if report.message else ''}{report.message})"
        if end in {_END.OUT_OF_MEMORY, _END.UNSCHEDULABLE}:
            await self._broker.fail(key, _failure(report, self._board.engine), stamp=report.id)
            return
        departed = end in {_END.PREEMPTED, _END.CANCELLED}
        if await self._broker.end_lost(key, departed=departed, why=why):
            self._starts.pop(key, None)
            return
        log.warning(f"the worker of {key} {why} before it took its task")
        self._starts[key] += end in {_END.FAILED, _END.EXITED}
        if self._starts[key] >= _MOST_STARTS:
            del self._starts[key]
            await self._broker.fail(key, _failure(report, self._board.engine), stamp=report.id)


def submission_id(owner: str, attempt: AttemptKey, number: int) -> str:
    """Return the id of an attempt's submission; its beginning is for people."""
    digest = hashlib.sha256(f"{owner}\n{attempt}".encode()).hexdigest()
    task = re.sub(r"[^a-z0-9]+", "-", attempt.task.lower()).strip("-")[:24].strip("-") or "task"
    return f"slipway-{task}-{digest[:16]}-{number}"


def _number_of(submission: str) -> int:
    return int(submission.rpartition("-")[2])


def _known_memory(offer: Offer) -> int:
    """Return the memory that an attempt is known to need; 0 if nothing is known."""
    asked = [needs.memory_bytes for needs in (*offer.requirements.prefers, *offer.requirements.any_of)]
    return max((offer.call.limits.max_memory_bytes, *asked))


def _failure(report: SubmissionReport, engine: str) -> Failure:
    """Return the failure of an attempt that the engine cannot run."""
    why = report.message or "it says no more"
    about = {"engine": engine, "node": report.node, "submission": report.id}
    match report.end:
        case _END.OUT_OF_MEMORY:
            return StageError(
                f"{engine} ended the task's worker for its memory: {why}", reason="OUT_OF_MEMORY", about=about
            ).failure()
        case _END.UNSCHEDULABLE:
            return ServiceError(
                f"no node of {engine} can run the task: {why}",
                reason="WORKER_UNFIT",
                remedy="add such a node to the cluster, then run the same export again",
                about=about,
            ).failure()
    return StageError(
        f"{engine} started {_MOST_STARTS} workers, and none took the task; the last one ended as {report.end}: {why}",
        reason="ENGINE_FAILED",
        remedy="see the engine's log of the submission; the nodes need Slipway's version, and must reach the coordinator",
        about=about,
    ).failure()
