"""What waits for a worker, and who goes first: the higher priority, then the project that runs least, then the oldest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from slipway_coordinator.offers import Offer

_Lane = tuple[str, int, str]


class Waiting(Mapping[str, Offer]):
    """Offers by key, in lanes of one stage, priority and project, so that choosing takes as long as there are lanes."""

    def __init__(self) -> None:
        self._offers: dict[str, Offer] = {}
        self._lanes: dict[_Lane, dict[str, int]] = {}
        self._added = 0

    def add(self, offer: Offer) -> None:
        """Let an offer wait behind those of its lane."""
        self._offers[offer.key] = offer
        self._added += 1
        self._lanes.setdefault(_lane(offer), {})[offer.key] = self._added

    def remove(self, key: str) -> Offer | None:
        """Take an offer away; None when it does not wait."""
        offer = self._offers.pop(key, None)
        if offer is not None:
            lane = self._lanes[_lane(offer)]
            del lane[key]
            if not lane:
                del self._lanes[_lane(offer)]
        return offer

    def first(self, stages: Collection[str], *, running: Mapping[str, int]) -> Offer | None:
        """The offer of these stages that goes first.

        Args:
            stages: Those a worker runs.
            running: How many attempts of each project run now.
        """
        best: tuple[int, int, int, str] | None = None
        for (stage, priority, project), lane in self._lanes.items():
            if stage in stages:
                key, number = next(iter(lane.items()))
                rank = (-priority, running.get(project, 0), number, key)
                best = rank if best is None or rank < best else best
        return None if best is None else self._offers[best[3]]

    def __getitem__(self, key: str) -> Offer:
        return self._offers[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._offers)

    def __len__(self) -> int:
        return len(self._offers)


def _lane(offer: Offer) -> _Lane:
    return offer.stage, offer.priority, offer.project
