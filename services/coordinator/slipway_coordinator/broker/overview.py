"""The workers and the queue as one caller may see them. What belongs to other projects is counted and never named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum

from slipway.planning.references import AttemptKey
from slipway.requirements import Abilities, Lack, Placement
from slipway.texts import shortened
from slipway_coordinator.broker.board import Board
from slipway_coordinator.broker.workers import KnownWorker
from slipway_coordinator.lifecycle.offers import Offer

MOST_GROUPS = 1000
"""Most entries of a queue."""
_MOST_DETAIL = 500


class WaitReason(StrEnum):
    """Why a task waits, by the names on the wire."""

    UNSPECIFIED = "UNSPECIFIED"
    NO_WORKER = "NO_WORKER"
    WORKER_UNFIT = "WORKER_UNFIT"
    WORKER_OUTDATED = "WORKER_OUTDATED"
    WORKERS_DRAINING = "WORKERS_DRAINING"
    NO_ROOM = "NO_ROOM"
    POSTPONED = "POSTPONED"
    IMPORTING = "IMPORTING"


_OF_LACK: Mapping[Lack, WaitReason] = {lack: WaitReason(lack.value) for lack in Lack}
_WHILE_POSTPONED = "a failed attempt is repeated a little later"
_WHILE_IMPORTED = "another task is importing one of its sources, which it then finds in the store"


@dataclass(frozen=True, slots=True)
class Sight:
    """What a caller may see.

    Attributes:
        everything: Whether it sees all workers, and the tasks of all projects.
        project: Returns whether it may see a project.
    """

    everything: bool
    project: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """An attempt that a worker runs; its stage is empty while that is not known yet."""

    key: AttemptKey
    stage: str


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker, with the attempts that the caller may see."""

    known: KnownWorker
    running: tuple[RunningAttempt, ...]


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """Attempts of one stage and project that wait for the same reason. Those of projects that the caller may not see have only a stage."""

    stage: str
    project: str
    count: int
    age: float = 0.0
    reason: WaitReason = WaitReason.UNSPECIFIED
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Queue:
    """The offers that wait at one moment, and the workers: copies that no later change affects.

    Attributes:
        waiting: The offers by their keys.
        since: When they were offered, by the board's clock.
        clock: What that clock shows.
        workers: Abilities of all live workers by name.
        ready: Names of those that take tasks.
        held_back: Offers that wait for another task's import.
        engine: Name of the engine that starts their workers; empty if workers pull.
        now: The moment, in seconds since the epoch.
    """

    waiting: Mapping[AttemptKey, Offer]
    since: Mapping[AttemptKey, float]
    clock: float
    workers: Mapping[str, Abilities]
    ready: Set[str]
    held_back: Set[AttemptKey]
    engine: str
    now: float

    @classmethod
    def of(cls, board: Board, *, now: float) -> Queue:
        """Copy the queue of a board, on its event loop and therefore with as little work as possible for each offer."""
        workers = {name: known.abilities for name, known in board.workers.items()}
        held_back = board.waiting.held_back(board.importing())
        return cls(
            board.waiting.copy(),
            board.offered_since(),
            board.clock(),
            workers,
            board.ready().keys(),
            held_back,
            board.engine,
            now,
        )

    def groups(self, sight: Sight) -> list[WaitingGroup]:
        """Return what waits, the longest wait first; at the end, numbers of what the caller may not see. Safe from any thread."""
        oldest: dict[tuple[str, str, WaitReason], tuple[float, str]] = {}
        counts, hidden = Counter[tuple[str, str, WaitReason]](), Counter[str]()
        judged: dict[Placement, tuple[WaitReason, str]] = {}
        for key, offer in self.waiting.items():
            if not (sight.everything or sight.project(key.project)):
                hidden[offer.stage] += 1
                continue
            age = max(self.clock - self.since.get(key, self.clock), 0.0)
            reason, detail = self._why(key, offer, judged)
            group = (offer.stage, key.project, reason)
            counts[group] += 1
            oldest[group] = max(oldest.get(group, (-1.0, "")), (age, detail))
        seen = [
            WaitingGroup(stage, project, counts[stage, project, reason], age, reason, detail)
            for (stage, project, reason), (age, detail) in oldest.items()
        ]
        seen.sort(key=lambda group: (-group.age, group.project, group.stage, group.reason))
        unseen = [WaitingGroup(stage, "", count) for stage, count in sorted(hidden.items())]
        return (seen[: max(MOST_GROUPS - len(unseen), 0)] + unseen)[:MOST_GROUPS]

    def _why(
        self, key: AttemptKey, offer: Offer, judged: dict[Placement, tuple[WaitReason, str]]
    ) -> tuple[WaitReason, str]:
        if key in self.held_back:
            return WaitReason.IMPORTING, _WHILE_IMPORTED
        placement = offer.placement
        if placement not in judged:
            judged[placement] = self._judge(placement)
        reason, detail = judged[placement]
        if reason is WaitReason.NO_ROOM and offer.not_before > self.now:
            others = {name for name in self.ready if placement.can(self.workers[name])} - set(offer.avoid)
            if not offer.avoid or not others:
                return WaitReason.POSTPONED, _WHILE_POSTPONED
        return reason, detail

    def _judge(self, placement: Placement) -> tuple[WaitReason, str]:
        if self.engine:
            return WaitReason.NO_ROOM, f"the engine {self.engine} has not started its worker yet, or others go first"
        able = sum(placement.can(self.workers[name]) for name in self.ready)
        if able:
            detail = f"the workers that can run {placement.stage} ({able}) have no room, or others go first"
            return WaitReason.NO_ROOM, shortened(detail, _MOST_DETAIL)
        lack, detail = placement.lack(self.workers.values())
        return _OF_LACK[lack], shortened(detail, _MOST_DETAIL)


def seen_workers(board: Board, sight: Sight) -> tuple[list[SeenWorker], int]:
    """Return the live workers that a caller may see, and how many others there are.

    A caller who does not see everything sees the workers that run tasks of its projects: it knows their names from its exports.
    """
    running: dict[str, list[RunningAttempt]] = {}
    for key, lease in board.held.items():
        if lease.epoch and (sight.everything or sight.project(key.project)):
            stage = "" if lease.offer is None else lease.offer.stage
            running.setdefault(lease.worker, []).append(RunningAttempt(key, stage))
    seen = [
        SeenWorker(known, tuple(sorted(running.get(name, ()), key=lambda one: one.key)))
        for name, known in board.workers.items()
        if sight.everything or name in running
    ]
    return seen, len(board.workers) - len(seen)
