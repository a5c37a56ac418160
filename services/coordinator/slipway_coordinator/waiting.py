"""What waits for a worker, and who goes first: the higher priority, then the project that runs least, then the oldest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from slipway_coordinator.offers import Offer


class _Lane(NamedTuple):
    """What offers have in common between which only their age decides."""

    stage: str
    priority: int
    project: str
    avoid: tuple[str, ...]
    postponed: bool

    def open_to(self, worker: str, stages: Collection[str], known: Mapping[str, Collection[str]]) -> bool:
        if self.stage not in stages:
            return False
        if worker not in self.avoid:
            return bool(self.avoid) or not self.postponed
        others = any(self.stage in runs for name, runs in known.items() if name not in self.avoid)
        return not self.postponed and not others


class Waiting(Mapping[str, Offer]):
    """Offers by key, in lanes of those that are alike, so that choosing takes as long as there are lanes."""

    def __init__(self) -> None:
        self._offers: dict[str, Offer] = {}
        self._lanes: dict[_Lane, dict[str, int]] = {}
        self._lane_of: dict[str, _Lane] = {}
        self._added = 0

    def add(self, offer: Offer, *, now: float = 0.0) -> None:
        """Let an offer wait behind those of its lane; ``now`` is in seconds since the epoch."""
        lane = _Lane(offer.stage, offer.priority, offer.project, offer.avoid, postponed=offer.not_before > now)
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

    def first(
        self,
        stages: Collection[str],
        *,
        running: Mapping[str, int],
        worker: str = "",
        known: Mapping[str, Collection[str]] | None = None,
    ) -> Offer | None:
        """The offer of these stages that goes first.

        Args:
            stages: Those a worker runs.
            running: How many attempts of each project run now.
            worker: Its name.
            known: Stages of every worker there is, by its name.
        """
        best: tuple[int, int, int, str] | None = None
        for lane, keys in self._lanes.items():
            if lane.open_to(worker, stages, known or {}):
                key, number = next(iter(keys.items()))
                rank = (-lane.priority, running.get(lane.project, 0), number, key)
                best = rank if best is None or rank < best else best
        return None if best is None else self._offers[best[3]]

    def __getitem__(self, key: str) -> Offer:
        return self._offers[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._offers)

    def __len__(self) -> int:
        return len(self._offers)
