"""The queue of offers. Order: the higher priority, then the project that runs least, then the oldest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set, ValuesView
from typing import NamedTuple

from slipway.planning.attempt_keys import AttemptKey
from slipway.planning.matching import Placement
from slipway.requirements import Abilities
from slipway_coordinator.model.offers import Offer


class _Lane(NamedTuple):
    """Properties shared by offers that differ only in age."""

    placement: Placement
    priority: int
    project: str
    postponed: bool

    def accepts(self, worker: str, known: Mapping[str, Abilities]) -> bool:
        if not self.placement.can(known[worker]):
            return False
        if self.postponed and (not self.placement.avoid or worker in self.placement.avoid):
            return False
        anybody = not self.placement.avoid and not self.placement.requirements.prefers
        return anybody or worker in self.placement.candidates(known)


class Waiting(Mapping[AttemptKey, Offer]):
    """Offers by key, grouped into lanes of equal properties, so that the time to choose grows with the lanes, not the offers."""

    def __init__(self) -> None:
        self._offers: dict[AttemptKey, Offer] = {}
        self._lanes: dict[_Lane, dict[AttemptKey, int]] = {}
        self._lane_of: dict[AttemptKey, _Lane] = {}
        self._addresses: dict[AttemptKey, frozenset[str]] = {}  # of imports
        self._added = 0

    def add(self, offer: Offer, *, now: float = 0.0) -> None:
        """Append an offer to its lane; ``now`` is in seconds since the epoch."""
        lane = _Lane(offer.placement, offer.priority, offer.project, postponed=offer.not_before > now)
        self._offers[offer.key] = offer
        self._lane_of[offer.key] = lane
        if addresses := offer.addresses:
            self._addresses[offer.key] = addresses
        self._added += 1
        self._lanes.setdefault(lane, {})[offer.key] = self._added

    def remove(self, key: AttemptKey) -> Offer | None:
        """Remove and return an offer; None if it does not wait."""
        offer = self._offers.pop(key, None)
        if offer is not None:
            lane = self._lane_of.pop(key)
            self._addresses.pop(key, None)
            del self._lanes[lane][key]
            if not self._lanes[lane]:
                del self._lanes[lane]
        return offer

    def release(self, *, now: float) -> None:
        """Release the offers that were postponed until now or earlier."""
        postponed = [key for lane, keys in self._lanes.items() if lane.postponed for key in keys]
        for offer in [self._offers[key] for key in postponed if self._offers[key].not_before <= now]:
            self.remove(offer.key)
            self.add(offer, now=now)

    def first(
        self,
        worker: str,
        known: Mapping[str, Abilities],
        *,
        running: Mapping[str, int],
        importing: Set[str] = frozenset(),
    ) -> Offer | None:
        """Return the first offer this worker can take that is not reserved for a preferred worker and not held back.

        Args:
            worker: The worker's name.
            known: Abilities of every known worker by name, including this one.
            running: Number of attempts running now, by project.
            importing: Addresses that an import must not have now.
        """
        best: tuple[int, int, int, AttemptKey] | None = None
        for lane, keys in self._lanes.items():
            if lane.accepts(worker, known):
                free = (key for key in keys if not self.is_held_back(key, importing))
                if (key := next(free, None)) is not None:
                    rank = (-lane.priority, running.get(lane.project, 0), keys[key], key)
                    best = rank if best is None or rank < best else best
        return None if best is None else self._offers[best[3]]

    def is_held_back(self, key: AttemptKey, importing: Set[str]) -> bool:
        """Return whether an offer imports one of these addresses."""
        return bool(importing) and key in self._addresses and not importing.isdisjoint(self._addresses[key])

    def values(self) -> ValuesView[Offer]:
        """Return all offers; copying them to a list is safe in any thread."""
        return self._offers.values()

    def __getitem__(self, key: AttemptKey) -> Offer:
        return self._offers[key]

    def __iter__(self) -> Iterator[AttemptKey]:
        return iter(self._offers)

    def __len__(self) -> int:
        return len(self._offers)
