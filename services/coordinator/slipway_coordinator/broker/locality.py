"""Which workers have the inputs of waiting attempts on their machines, so that an attempt goes where its inputs are.

Workers report the artifacts in their caches. An offer that a worker asks for is left to another one that is no busier and fetches less,
but for two seconds at most (delay scheduling: Zaharia et al., 2010). Of the offers whose turn it is, a worker takes the one of which it
has most. In memory only, and a preference only: what a worker reports wrongly costs others these two seconds and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field

from slipway.artifacts.digests import abridged, is_digest
from slipway.planning.references import AttemptKey

LONGEST_SECONDS = 2.0
"""How long an offer is passed over for a better worker, or for an offer that is nearer to the worker that asks."""
LOOK_AHEAD = 16
"""Offers of equal properties that are compared with each other. In a longer queue, the others are younger."""
LEAST_BYTES = 1 << 20
"""Fewer bytes are no reason: fetching them takes no longer than asking."""
_KEPT_SECONDS = 30.0
"""How long a worker is taken to have what it got or made, without reporting it: its report may have been on its way."""
_MOST_KEPT = 256
_MOST_LEFT = 8
"""Offers that a worker that asks leaves to others. Where more wait, it gets one of the next: it does not stand idle before a queue."""

Accepts = Callable[[str], bool]
"""Whether a worker of this name could take an offer."""


class Locality:
    """What workers hold, and the sizes of what waiting attempts fetch, of one coordinator.

    Args:
        clock: Seconds; only differences matter.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reported: dict[str, frozenset[int]] = {}  # by worker, of those that report them
        self._noted: dict[str, dict[int, float]] = {}  # what a worker got or made, and when
        self._holders: dict[int, set[str]] = {}  # by abridged digest, of inputs of waiting attempts alone
        self._sizes: dict[AttemptKey, dict[int, int]] = {}  # bytes to fetch, by abridged digest
        self._partial = set[AttemptKey]()  # attempts that leave out files of their inputs
        self._passed: dict[AttemptKey, float] = {}  # since when an offer is passed over

    @property
    def matters(self) -> bool:
        """Whether any worker reports what it holds."""
        return bool(self._reported)

    # What is known

    def note_report(self, worker: str, held: frozenset[int] | None) -> None:
        """Record what a worker reports to hold; None if it reports nothing new."""
        if held is not None:
            self._reported[worker] = held
            for digest, holders in self._holders.items():
                holders.add(worker) if self._holds(worker, digest) else holders.discard(worker)

    def note_granted(self, worker: str, key: AttemptKey) -> None:
        """Record that a worker fetches an attempt's inputs."""
        if key not in self._partial:
            self._note(worker, self._sizes.get(key, ()))

    def note_made(self, worker: str, digests: Iterable[str]) -> None:
        """Record what a worker has made."""
        self._note(worker, [abridged(digest) for digest in digests if is_digest(digest)])

    def _note(self, worker: str, digests: Iterable[int]) -> None:
        if worker not in self._reported:
            return  # it has no cache, or does not say what is in it
        noted = self._noted.setdefault(worker, {})
        noted |= dict.fromkeys(digests, self._clock())
        while len(noted) > _MOST_KEPT:
            del noted[next(iter(noted))]
        for digest in self._holders.keys() & noted.keys():
            self._holders[digest].add(worker)

    def _holds(self, worker: str, digest: int) -> bool:
        return digest in self._reported[worker] or digest in self._noted.get(worker, ())

    def is_measured(self, key: AttemptKey) -> bool:
        """Return whether it is known what an attempt fetches."""
        return key in self._sizes

    def note_sizes(self, key: AttemptKey, sizes: Mapping[str, int], *, partial: bool = False) -> None:
        """Record how many bytes of each input, by its digest, an attempt fetches; ``partial`` if it leaves out the large files."""
        self._sizes[key] = {abridged(digest): size for digest, size in sizes.items() if is_digest(digest)}
        for digest in self._sizes[key].keys() - self._holders.keys():
            self._holders[digest] = {worker for worker in self._reported if self._holds(worker, digest)}
        if partial:
            self._partial.add(key)

    def forget(self, workers: Collection[str], waiting: Collection[AttemptKey]) -> None:
        """Forget all but these workers and these offers."""
        self._reported = {name: held for name, held in self._reported.items() if name in workers}
        self._sizes = {key: sizes for key, sizes in self._sizes.items() if key in waiting}
        self._partial &= self._sizes.keys()
        inputs, known = set[int]().union(*self._sizes.values()), self._reported.keys()
        self._holders = {digest: holders & known for digest, holders in self._holders.items() if digest in inputs}
        self._noted = {name: noted for name, noted in self._noted.items() if name in known}
        before = self._clock() - _KEPT_SECONDS
        for name, noted in self._noted.items():
            for digest in [digest for digest, at in noted.items() if at <= before]:
                del noted[digest]
                if digest in self._holders and digest not in self._reported[name]:
                    self._holders[digest].discard(name)
        self._passed = {key: since for key, since in self._passed.items() if key in waiting}

    # What follows

    def beside(self, worker: str, rivals: Iterable[str]) -> Nearness | None:
        """Return how near offers are to a worker, beside others that could take them; None if no worker reports what it holds."""
        return Nearness(self, worker, self._reported.keys() & rivals) if self._reported else None

    def bytes_at(self, worker: str, key: AttemptKey) -> int:
        """Return how many bytes of an attempt's inputs a worker holds."""
        return sum(size for digest, size in self._sizes[key].items() if worker in self._holders[digest])

    def holders(self, key: AttemptKey, workers: Set[str], *, least_bytes: int) -> list[str]:
        """Return those of some workers that hold this much of an attempt's inputs, the one with most first."""
        at = Counter[str]()
        for digest, size in self._sizes[key].items():
            for worker in self._holders[digest] & workers:
                at[worker] += size
        found = [(-held, worker) for worker, held in at.items() if held >= least_bytes]
        return [worker for _, worker in sorted(found)]

    def bytes_of(self, key: AttemptKey) -> int:
        """Return how many bytes an attempt fetches where nothing of it is."""
        return sum(self._sizes[key].values())

    def pass_over(self, keys: Iterable[AttemptKey]) -> None:
        """Begin to count how long offers are passed over."""
        now = self._clock()
        for key in keys:
            self._passed.setdefault(key, now)

    def take(self, key: AttemptKey) -> None:
        """Stop counting: an offer was given to a worker."""
        self._passed.pop(key, None)

    def is_overdue(self, key: AttemptKey) -> bool:
        """Return whether an offer was passed over for long enough."""
        return self._clock() - self._passed.get(key, self._clock()) >= LONGEST_SECONDS


@dataclass
class Nearness:
    """How near waiting offers are to one worker that asks for some. One offer at most is left to each other worker, or one would get all.

    Attributes:
        locality: What is known.
        worker: The worker that asks.
        rivals: Other workers to which an offer may be left.
    """

    locality: Locality
    worker: str
    rivals: set[str]
    _left: set[AttemptKey] = field(default_factory=set)

    def rank(self, key: AttemptKey, accepts: Accepts) -> tuple[int, int] | None:
        """Return the place of an offer among those of its priority, the least first; None if it is left to another worker.

        Args:
            key: The offer.
            accepts: Whether another worker could take it.
        """
        known = self.locality
        if known.is_overdue(key):
            return (0, 0)
        if not known.is_measured(key):
            return (1, 0)
        own = known.bytes_at(self.worker, key)
        if own + LEAST_BYTES <= known.bytes_of(key) and self._leave(key, own, accepts):
            return None
        return (1, -(own // LEAST_BYTES))

    def pass_over(self, keys: Iterable[AttemptKey]) -> None:
        """Begin to count how long offers are passed over."""
        self.locality.pass_over(keys)

    def _leave(self, key: AttemptKey, own: int, accepts: Accepts) -> bool:
        """Return whether an offer is left to a worker that holds more: from now on to the one that holds most."""
        if key in self._left:
            return True
        if len(self._left) == _MOST_LEFT:
            return False
        for worker in self.locality.holders(key, self.rivals, least_bytes=own + LEAST_BYTES):
            if accepts(worker):
                self.rivals.discard(worker)
                self._left.add(key)
                return True
        return False
