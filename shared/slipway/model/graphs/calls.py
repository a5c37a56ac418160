"""The calls that a graph takes: those that its metadata promises, and any call of a graph of fixed shapes.

A cache of fixed length is filled from its end: the last places hold the tokens so far, and the mask leaves out those before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[np.generic]"
Arrays: TypeAlias = "dict[str, Array]"

IDS, MASK, PAST, PRESENT = "input_ids", "attention_mask", "past_key_values.", "present."
PADDING_SIDE, SHARED_BUFFER, LOGITS_TO_KEEP = "padding_side", "past_present_share_buffer", "logits_to_keep"
"""Names of the properties."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The calls that a decoder's graph takes, and the results that it returns.

    Attributes:
        shared_buffer: Whether past and present keys and values may be one buffer. Such a graph counts the tokens of a row by its
            mask: rows are padded on the right, and only a single row takes several tokens after a past.
        last_logits: Whether it returns logits of the last token of each row only.
    """

    shared_buffer: bool = False
    last_logits: bool = False

    @property
    def metadata(self) -> dict[str, str]:
        """Return the properties of the file."""
        shared = {SHARED_BUFFER: "1", PADDING_SIDE: "right"} if self.shared_buffer else {}
        return shared | ({LOGITS_TO_KEEP: "1"} if self.last_logits else {})

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Promise:
        """Read the properties of a file; a file that says nothing takes every call and returns all logits."""
        return cls(
            shared_buffer=metadata.get(SHARED_BUFFER) == "1",
            last_logits=metadata.get(LOGITS_TO_KEEP) == "1",
        )


EVERY_CALL = Promise()
"""The promise of a usual graph: every call, and logits of all tokens."""


_GROWING = (".key", ".value")
"""Ends of the names of a cache's parts that have a place for each token; all others are states of one size."""


def empty_part(shape: Sequence[Any], *, batch: int) -> Array:
    """Return a part of a cache before the first token, from the axes of its input: an axis that varies is empty, and a state is zero."""
    import numpy as np

    return np.zeros((batch, *(_number(axis) or 0 for axis in shape[1:])), np.float32)


class TooLongError(Exception):
    """A text has more tokens than a graph of fixed shapes has room for."""


class FixedGraph:
    """A graph with fixed axes.

    Args:
        run: Function that runs the graph on arrays of exactly its shapes.
        shapes: Axes of each input: a number where an axis is fixed.
        per_token: Whether the results are one per token.
        padding: Token for places that a text does not fill.
    """

    def __init__(
        self,
        run: Callable[[Arrays], Arrays],
        shapes: Mapping[str, Sequence[Any]],
        *,
        per_token: bool,
        padding: int = 0,
    ) -> None:
        self._run, self._shapes = run, shapes
        self._per_token, self._padding = per_token, padding
        self._rows = _number(next(iter(shapes.values()))[0])
        self._tokens = _number(shapes[IDS][1]) if IDS in shapes else None
        self._past = [name for name in shapes if name.startswith(PAST)]
        growing = next((shapes[name] for name in self._past if name.endswith(_GROWING)), None)
        self._places = _number(growing[2]) if growing and self._tokens is not None else None

    @property
    def room(self) -> int | None:
        """Return how many tokens a text may have; None if that is not fixed."""
        return self._tokens if self._places is None or self._tokens is None else self._places + 1

    def empty_past(self, *, batch: int) -> Arrays:
        """Return what the graph keeps before the first token: no keys and values, or masked ones of a fixed length; states of zeros."""
        return {name: empty_part(self._shapes[name], batch=batch) for name in self._past if ".encoder." not in name}

    def run(self, feed: Arrays) -> Arrays:
        """Run the graph.

        Raises:
            TooLongError: The text is longer than :attr:`room`.
        """
        import numpy as np

        call = self._call if self._places is None else self._call_with_past
        count = len(next(iter(feed.values())))
        if self._rows is None:
            return call(feed)
        parts = []
        for start in range(0, count, self._rows):
            kept = min(self._rows, count - start)
            order = np.minimum(np.arange(start, start + self._rows), count - 1)  # the last row fills up the batch
            results = call({name: value[order] for name, value in feed.items()})
            parts.append({name: value[:kept] for name, value in results.items()})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _call(self, feed: Arrays) -> Arrays:
        import numpy as np

        fitted = {}
        for name, value in feed.items():
            size = _number(self._shapes[name][1])
            short = 0 if size is None or name.startswith(PAST) else size - value.shape[1]
            if short < 0:
                raise TooLongError(f"{name} has {value.shape[1]} tokens, and the graph has room for {size}")
            fill = self._padding if name == IDS else 0
            fitted[name] = np.pad(value, [(0, 0), (0, short), *[(0, 0)] * (value.ndim - 2)], constant_values=fill)
        results = self._run(fitted)
        if not self._per_token or self._tokens is None or IDS not in feed:
            return results
        length = feed[IDS].shape[1]
        return {
            name: value[:, :length] if value.ndim > 1 and value.shape[1] == self._tokens else value
            for name, value in results.items()
        }

    def _call_with_past(self, feed: Arrays) -> Arrays:
        """Feed the new tokens in pieces that fit into the graph; each fills its last places."""
        import numpy as np

        assert self._tokens is not None
        assert self._places is not None
        given = {name: value for name, value in feed.items() if not name.startswith(PAST) and name != MASK}
        past = {name: value for name, value in feed.items() if name.startswith(PAST)}
        mask, new = feed[MASK], feed[IDS].shape[1]
        before = mask.shape[1] - new
        results: list[Arrays] = []
        for start in range(0, new, self._tokens):
            count = min(self._tokens, new - start)
            cached = before + start
            if cached > self._places:
                raise TooLongError(f"the cache has {self._places} places, and {cached} tokens came before")
            lead = ((0, 0), (self._tokens - count, 0))
            piece = {name: np.pad(value[:, start : start + count], lead) for name, value in given.items()}
            seen, own = mask[:, :cached], mask[:, cached : cached + count]
            piece[MASK] = np.concatenate(
                [np.pad(seen, ((0, 0), (self._places - cached, 0))), np.pad(own, lead)], axis=1
            )
            outputs = self._run({**piece, **past})
            past = {
                PAST + name.removeprefix(PRESENT): self._move_up(value, count)
                for name, value in outputs.items()
                if name.startswith(PRESENT)
            }
            others = {name: value for name, value in outputs.items() if not name.startswith(PRESENT)}
            results.append({name: value[:, self._tokens - count :] for name, value in others.items()})
        joined = {name: np.concatenate([result[name] for result in results], axis=1) for name in results[0]}
        return joined | {PRESENT + name.removeprefix(PAST): value for name, value in past.items()}

    def _move_up(self, present: Array, count: int) -> Array:
        """Return the cache for the next call: without unfilled places. (B, heads, past + tokens, size) → (B, heads, past, size)."""
        import numpy as np

        assert self._places is not None
        kept = np.concatenate([present[:, :, : self._places], present[:, :, present.shape[2] - count :]], axis=2)
        return kept[:, :, -self._places :]


def _number(axis: Any) -> int | None:
    return axis if isinstance(axis, int) else None
