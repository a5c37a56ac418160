"""Hands attempts that wait to an engine, and ends those of which the engine lost the worker.

The board stays the only place that knows what should run. Again and again it is compared with the submissions: an attempt that waits and
has none is submitted, and a submission whose attempt is not wanted any more is cancelled. So nothing has to be stored: after a restart
the engine is asked what it still has, and the workers report what they run.

A submission's id is made from its attempt and a number that counts up, so a repeated call of the engine is the same submission. Projects take
turns, and few submissions wait at the engine at a time: otherwise those of a large export would be in its queue before all others'.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from slipway.contracts.engine import Engine, Submission, SubmissionEnd, SubmissionReport
from slipway.division import split_id
from slipway.errors import Failure, ModelExportError, ServiceError, StageError
from slipway.observability.telemetry import within
from slipway.planning.references import AttemptKey
from slipway.texts import one_line, shortened
from slipway_coordinator.broker.broker import Broker
from slipway_coordinator.broker.inputs import Inputs, ReadManifest, folder_bytes
from slipway_coordinator.broker.shares import Shares
from slipway_coordinator.lifecycle.offers import Offer
from slipway_coordinator.storage.events import Hub
from slipway_protos.v1 import export_pb2

log = logging.getLogger("slipway.coordinator.broker")

_LOOK_SECONDS = 1.0
_EXIT_SECONDS = 10.0
"""How long a worker may take to end after its result, or after it lost its lease."""
_LOST_SECONDS = 30.0
"""How long the engine may take to say that a submission has ended, whose worker lost its lease; then the attempt gets another one."""
_MESSAGE_LENGTH = 2000
_MOST_STARTS = 3
"""Workers in a row of an attempt that may end before they took it."""
_LONGEST_TASK = 24
"""Characters of a task's name in a submission's id."""
MOST_WAITING = 32
"""Submissions that may wait at the engine."""

_END = SubmissionEnd


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


@dataclass
class _Submitted:
    """A submission that has not ended. ``idle_since`` is by :func:`time.monotonic`; 0 while its worker has something to do."""

    id: str
    attempt: AttemptKey
    message: str = ""
    cancelled: bool = False
    idle_since: float = 0.0


class Submitter:
    """Submits the attempts of one coordinator to one engine. All methods run on one event loop.

    Args:
        broker: Offers and leases.
        setup: The engine.
        hub: Shows watchers where their tasks run and why they wait.
        manifests: Measures inputs.
        unended: Names of the exports that have not ended, also of those that are not resumed yet.
    """

    def __init__(
        self, broker: Broker, setup: EngineSetup, hub: Hub, manifests: ReadManifest, unended: Container[str]
    ) -> None:
        self._broker, self._board, self._engine, self._setup = broker, broker.board, setup.engine, setup
        self._hub, self._unended = hub, unended
        self._inputs = Inputs(broker.board, manifests)
        self._board.engine = setup.name
        self._submitted: dict[AttemptKey, _Submitted] = {}
        self._numbers: dict[AttemptKey, int] = {}  # of the last submission of each attempt
        self._starts = Counter[AttemptKey]()  # submissions in a row that ended before a lease
        self._nodes: dict[AttemptKey, str] = {}  # where attempts of present exports run or ran
        self._shares = Shares()
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect to the engine, and adopt what an earlier process left there.

        Raises:
            ModelExportError: As :meth:`~slipway.contracts.engine.Engine.start`.
        """
        await self._engine.start()
        for report in await self._engine.adopt():
            await self._adopt(_checked(report))

    def begin(self) -> None:
        """Begin to submit, once the exports that have not ended are known."""
        self._running = asyncio.create_task(self._keep_submitting(), context=contextvars.Context())

    async def stop(self) -> None:
        """Submit nothing more, and disconnect from the engine."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._setup.cancels_at_stop:
            cancelling = (self._engine.cancel(one.id) for one in self._submitted.values())
            for failed in await asyncio.gather(*cancelling, return_exceptions=True):
                if isinstance(failed, Exception):
                    log.warning(f"a submission could not be cancelled: {failed}")
        await self._engine.stop()

    async def _keep_submitting(self) -> None:
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                try:
                    if watching.done():
                        log.error(f"the reports of {self._setup.name} ended: {watching.exception()!r}; reading on")
                        watching = asyncio.create_task(self._watch())
                    await self._look()
                except ModelExportError as error:
                    log.warning(f"tasks cannot be submitted now: {error}")
                except Exception:  # if this loop ended, no task would run any more
                    log.exception(f"tasks cannot be submitted to {self._setup.name} now")
                    await asyncio.sleep(_LOOK_SECONDS)
                await self._broker.wait_for_change(_LOOK_SECONDS)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _adopt(self, report: SubmissionReport) -> None:
        """Take a submission over; of several of one attempt the last one, as only its worker may get the lease."""
        try:
            key, number = AttemptKey.parse(report.attempt), _number_of(report.id)
        except (ModelExportError, ValueError):
            log.warning(f"{report.id} at {self._setup.name} is not adopted: it is no submission")
            return
        earlier = self._submitted.get(key)
        if earlier is not None and number < self._numbers[key]:
            await self._engine.cancel(report.id)
            return
        if earlier is not None:
            await self._engine.cancel(earlier.id)
        log.info(f"adopted submission {report.id} of {key}")
        self._numbers[key] = number
        self._submitted[key] = _Submitted(report.id, key)
        self._nodes[key] = report.node

    async def _look(self) -> None:
        """Compare what is wanted with what is submitted."""
        present = self._board.wanted
        self._nodes = {
            key: node for key, node in self._nodes.items() if key.export in present or key in self._submitted
        }
        self._numbers = {
            key: number
            for key, number in self._numbers.items()
            if key.export in self._unended or key in self._submitted
        }
        self._inputs.forget()
        for key, one in list(self._submitted.items()):
            idle_seconds = self._idle_seconds(one)
            if idle_seconds is None:
                continue
            if idle_seconds > _LOST_SECONDS and self._board.is_wanted(key):
                log.warning(f"{self._setup.name} does not say what became of {one.id}: {key} gets another worker")
                del self._submitted[key]
            if not one.cancelled and idle_seconds >= self._patience(one):
                one.cancelled = True
                await self._engine.cancel(one.id)
        for offer in self._due():
            await self._submit(offer)

    def _idle_seconds(self, one: _Submitted) -> float | None:
        """Return how long a submission's worker has had nothing to do, as its result or its lease is gone; None if it has."""
        key, now = one.attempt, time.monotonic()
        is_unknown = key.export not in self._board.wanted and key.export in self._unended  # not resumed yet
        is_lost = key in self._board.waiting and self._board.was_taken_by(key, one.id)
        if is_unknown or (self._board.is_wanted(key) and not is_lost):
            one.idle_since = 0.0
            return None
        one.idle_since = one.idle_since or now
        return now - one.idle_since

    def _patience(self, one: _Submitted) -> float:
        """Return how long a worker that has nothing to do may take to end by itself."""
        wanted = self._board.wanted.get(one.attempt.export)
        is_revoked = wanted is not None and one.attempt in wanted.revoked
        return 0.0 if is_revoked or one.attempt not in self._nodes else _EXIT_SECONDS

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
        sizes = await self._inputs.measure(offer)
        if offer.key not in self._board.waiting or offer.key in self._submitted:
            return
        number = self._numbers[offer.key] = self._numbers.get(offer.key, 0) + 1
        submission = Submission(
            id=submission_id(self._setup.owner, offer, number),
            attempt=str(offer.key),
            stage=offer.stage,
            project=offer.project,
            export=offer.export,
            priority=offer.priority,
            requirements=offer.requirements,
            threads=offer.call.limits.threads,
            memory_bytes=_known_memory(offer),
            disk_bytes=folder_bytes(offer, sizes),
            inputs=sizes,
            near=self._inputs.nodes_near(offer.export, sizes, self._nodes),
        )
        self._submitted[offer.key] = _Submitted(submission.id, offer.key)
        try:
            await self._engine.submit(submission)
        except Exception:  # the engine knows nothing of it, so it would never report an end
            del self._submitted[offer.key]
            raise
        with within(offer.traceparent):
            log.info(f"submitted {offer.key} to {self._board.engine} as {submission.id}")

    # Reports of the engine

    async def _watch(self) -> None:
        async for report in self._engine.watch():
            try:
                await self._note(_checked(report))
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
        if unfit := self._board.unfit.pop(key, ""):
            report = replace(report, message=unfit)
        if not self._board.is_wanted(key):
            self._starts.pop(key, None)
            await self._broker.end_lost(key, one.id, departed=True, why="was ended by its engine")  # if it was revoked
            return
        why = f"was lost by {self._board.engine} ({end}{': ' if report.message else ''}{report.message})"
        if end in {_END.OUT_OF_MEMORY, _END.UNSCHEDULABLE}:
            await self._broker.fail(key, one.id, _failure(report, self._board.engine))
            return
        departed = end in {_END.PREEMPTED, _END.CANCELLED}
        if await self._broker.end_lost(key, one.id, departed=departed, why=why) or self._board.was_taken_by(
            key, one.id
        ):
            self._starts.pop(key, None)
            return
        log.warning(f"the worker of {key} {why} before it took its task")
        self._starts[key] += end in {_END.FAILED, _END.EXITED}
        if self._starts[key] >= _MOST_STARTS:
            del self._starts[key]
            await self._broker.fail(key, one.id, _failure(report, self._board.engine))


def submission_id(owner: str, offer: Offer, number: int) -> str:
    """Return the id of an attempt's submission; its beginning is for people.

    The trace tells an export from an earlier one of its name, whose submissions the engine may still have.
    """
    digest = hashlib.sha256(f"{owner}\n{offer.key}\n{offer.traceparent}".encode()).hexdigest()
    whole, part = split_id(offer.task, offer.call.params)
    suffix = f"-{part}" if part else ""
    task = re.sub(r"[^a-z0-9]+", "-", whole.lower()).strip("-")[: _LONGEST_TASK - len(suffix)].strip("-") or "task"
    return f"slipway-{task}{suffix}-{digest[:16]}-{number}"


def _checked(report: SubmissionReport) -> SubmissionReport:
    """Return a report whose texts, which nodes may have written, are lines of limited length."""
    node, message, link = (
        shortened(one_line(text), _MESSAGE_LENGTH) for text in (report.node, report.message, report.link)
    )
    return replace(report, node=node, message=message, link=link)


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
