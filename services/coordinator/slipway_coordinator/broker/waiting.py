"""What waits for a worker, and who goes first: the higher priority, then the project that runs least, then the oldest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, ValuesView
from typing import NamedTuple

from slipway.planning.matching import Call
from slipway.requirements import Abilities
from slipway_coordinator.model.offers import Offer


class _Lane(NamedTuple):
    """What offers have in common between which only their age decides."""

    call: Call
    priority: int
    project: str
    postponed: bool

    def open_to(self, worker: str, known: Mapping[str, Abilities]) -> bool:
        if not self.call.can(known[worker]):
            return False
        if self.postponed and (not self.call.avoid or worker in self.call.avoid):
            return False
        anybody = not self.call.avoid and not self.call.requirements.prefers
        return anybody or worker in self.call.candidates(known)


class Waiting(Mapping[str, Offer]):
    """Offers by key, in lanes of those that are alike, so that choosing takes as long as there are lanes."""

    def __init__(self) -> None:
        self._offers: dict[str, Offer] = {}
        self._lanes: dict[_Lane, dict[str, int]] = {}
        self._lane_of: dict[str, _Lane] = {}
        self._added = 0

    def add(self, offer: Offer, *, now: float = 0.0) -> None:
        """Let an offer wait behind those of its lane; ``now`` is in seconds since the epoch."""
        lane = _Lane(offer.call, offer.priority, offer.project, postponed=offer.not_before > now)
        self._offers[offer.key] = offer
        self._lane_of[offer.key] = lane
        self._added += 1
        self._lanes.setdefault(lane, {})[offer.key] = self._added

    def remove(self, key: str) -> Offer | None:
        """Take an offer away; None when it does not wait."""
        offer = self._offers.pop(key, None)
        if offer is not None:
            lane = self._lane_of.pop(key)
            del self._lanes[lane][key]
            if not self._lanes[lane]:
                del self._lanes[lane]
        return offer

    def release(self, *, now: float) -> None:
        """Let go on what was postponed until now."""
        postponed = [key for lane, keys in self._lanes.items() if lane.postponed for key in keys]
        for offer in [self._offers[key] for key in postponed if self._offers[key].not_before <= now]:
            self.remove(offer.key)
            self.add(offer, now=now)

    def first(self, worker: str, known: Mapping[str, Abilities], *, running: Mapping[str, int]) -> Offer | None:
        """The offer that goes first of those a worker can take and nobody is preferred for.

        Args:
            worker: Its name.
            known: What every worker there is has, by its name; this worker's among them.
            running: How many attempts of each project run now.
        """
        best: tuple[int, int, int, str] | None = None
        for lane, keys in self._lanes.items():
            if lane.open_to(worker, known):
                key, number = next(iter(keys.items()))
                rank = (-lane.priority, running.get(lane.project, 0), number, key)
                best = rank if best is None or rank < best else best
        return None if best is None else self._offers[best[3]]

    def values(self) -> ValuesView[Offer]:
        """All offers; a list of them can be made in any thread."""
        return self._offers.values()

    def __getitem__(self, key: str) -> Offer:
        return self._offers[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._offers)

    def __len__(self) -> int:
        return len(self._offers)
