"""The queue of waiting offers: by project, in each by priority and then age. In memory only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Mapping, Set, ValuesView
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from slipway.planning.references import AttemptKey
from slipway.requirements import Abilities, Placement
from slipway_coordinator.broker.locality import LOOK_AHEAD, Nearness
from slipway_coordinator.lifecycle.offers import Offer


class _Lane(NamedTuple):
    """Properties shared by offers that differ only in age."""

    placement: Placement
    priority: int
    postponed: bool

    def accepts(self, worker: str, known: Mapping[str, Abilities]) -> bool:
        if not self.placement.can(known[worker]):
            return False
        if self.postponed and (not self.placement.avoid or worker in self.placement.avoid):
            return False
        anybody = not self.placement.avoid and not self.placement.requirements.prefers
        return anybody or worker in self.placement.candidates(known)


@dataclass(slots=True)
class _Line:
    """The offers of one lane, each with its age."""

    lane: _Lane
    offers: dict[AttemptKey, int] = field(default_factory=dict)


class _Rank(NamedTuple):
    """The place of an offer among those that a worker can take, the least first; ``place`` says how near it is."""

    priority: int
    place: tuple[int, int]
    age: int
    key: AttemptKey

    def is_before(self, other: _Rank) -> bool:
        """Return whether this offer would go first if nothing was nearer than another."""
        return (self.priority, self.age) < (other.priority, other.age)


class Waiting(Mapping[AttemptKey, Offer]):
    """Offers by key, grouped by project and into lanes of equal properties.

    The time to choose grows with the lanes of the projects that come first, not with the offers.
    """

    def __init__(self) -> None:
        self._offers: dict[AttemptKey, Offer] = {}
        self._lanes: dict[str, dict[_Lane, _Line]] = {}  # of each project
        self._line_of: dict[AttemptKey, _Line] = {}
        self._addresses: dict[AttemptKey, frozenset[str]] = {}  # of imports
        self._counts: dict[str, int] = {}  # of each project
        self._added = 0

    def add(self, offer: Offer, *, now: float = 0.0) -> None:
        """Append an offer to its lane; ``now`` is in seconds since the epoch."""
        lane = _Lane(offer.placement, offer.priority, postponed=offer.not_before > now)
        of_project = self._lanes.setdefault(offer.project, {})
        line = of_project.get(lane)
        if line is None:
            line = of_project[lane] = _Line(lane)
        self._offers[offer.key], self._line_of[offer.key] = offer, line
        if addresses := offer.addresses:
            self._addresses[offer.key] = addresses
        self._added += 1
        self._counts[offer.project] = self._counts.get(offer.project, 0) + 1
        line.offers[offer.key] = self._added

    def remove(self, key: AttemptKey) -> Offer | None:
        """Remove and return an offer; None if it does not wait."""
        offer = self._offers.pop(key, None)
        if offer is not None:
            line, lanes = self._line_of.pop(key), self._lanes[offer.project]
            self._addresses.pop(key, None)
            self._counts[offer.project] -= 1
            del line.offers[key]
            if not line.offers:
                del lanes[line.lane]
            if not lanes:
                del self._lanes[offer.project], self._counts[offer.project]
        return offer

    def release(self, *, now: float) -> None:
        """Release the offers that were postponed until now or earlier."""
        lines = (line for of_project in self._lanes.values() for line in of_project.values())
        postponed = [key for line in lines if line.lane.postponed for key in line.offers]
        for offer in [self._offers[key] for key in postponed if self._offers[key].not_before <= now]:
            self.remove(offer.key)
            self.add(offer, now=now)

    @property
    def projects(self) -> KeysView[str]:
        """Projects with offers, in the order in which they began to wait."""
        return self._lanes.keys()

    def count_by_project(self) -> dict[str, int]:
        """Return the number of each project's offers. Safe from any thread."""
        return dict(self._counts)

    def first(
        self,
        worker: str,
        known: Mapping[str, Abilities],
        *,
        projects: Iterable[str],
        importing: Set[str] = frozenset(),
        near: Nearness | None = None,
    ) -> Offer | None:
        """Return the first offer this worker can take that is not reserved for a preferred worker and not held back.

        With ``near``, the first of a priority is the one of whose inputs the worker has most, and none that is left to another worker.

        Args:
            worker: The worker's name.
            known: Abilities of every known worker by name, including this one.
            projects: Projects with offers, in the order of their turns.
            importing: Addresses that an import must not have now.
            near: How near offers are to this worker; None if that does not matter.
        """
        accepted: dict[tuple[Placement, bool], bool] = {}
        for project in projects:
            best: _Rank | None = None
            passed: list[_Rank] = []
            for lane, line in self._lanes[project].items():
                kind = (lane.placement, lane.postponed)
                if kind not in accepted:
                    accepted[kind] = lane.accepts(worker, known)
                if not accepted[kind]:
                    continue
                free = (key for key in line.offers if not self.is_held_back(key, importing))
                for key in islice(free, 1 if near is None else LOOK_AHEAD):
                    place = (1, 0) if near is None else near.rank(key, lambda name: lane.accepts(name, known))  # noqa: B023 - called here
                    rank = _Rank(-lane.priority, place or (0, 0), line.offers[key], key)
                    if place is not None and (best is None or rank < best):
                        best = rank
                    passed.append(rank)
            if near is not None:
                near.pass_over(rank.key for rank in passed if best is None or rank.is_before(best))
            if best is not None:
                return self._offers[best.key]
        return None

    def held_back(self, importing: Set[str]) -> Set[AttemptKey]:
        """Return the offers that import one of these addresses."""
        if not importing:
            return frozenset()
        return {key for key, addresses in self._addresses.items() if not importing.isdisjoint(addresses)}

    def is_held_back(self, key: AttemptKey, importing: Set[str]) -> bool:
        """Return whether an offer imports one of these addresses."""
        return bool(importing) and key in self._addresses and not importing.isdisjoint(self._addresses[key])

    def copy(self) -> dict[AttemptKey, Offer]:
        """Return a copy of the offers by key."""
        return dict(self._offers)

    def values(self) -> ValuesView[Offer]:
        """Return all offers; copying them to a list is safe in any thread."""
        return self._offers.values()

    def __getitem__(self, key: AttemptKey) -> Offer:
        return self._offers[key]

    def __iter__(self) -> Iterator[AttemptKey]:
        return iter(self._offers)

    def __len__(self) -> int:
        return len(self._offers)
