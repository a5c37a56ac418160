"""Calls at which a graph is compared with PyTorch: other shapes than the sample's, so that a lost branch shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BEYOND = 5
"""Tokens behind a threshold."""


@dataclass(frozen=True, slots=True)
class Case:
    """The shape of one call.

    Attributes:
        name: For messages.
        batch: Rows.
        sequence: Tokens of the call.
        past: Tokens before it, in the cache.
        padding: Padded places of the first rows.
    """

    name: str
    batch: int
    sequence: int
    past: int = 0
    padding: tuple[int, ...] = ()


_DECODER = (
    Case("one token, nothing before", 1, 1),
    Case("a text, nothing before", 1, 9),
    Case("padded texts, nothing before", 3, 7, 0, (3, 0, 1)),
    Case("one token after one", 1, 1, 1),
    Case("one token after padded texts", 2, 1, 6, (2, 0)),
    Case("several tokens after padded texts", 2, 5, 4, (1, 0)),
)
_TEXT = (
    Case("one token", 1, 1),
    Case("a text", 1, 9),
    Case("padded texts", 3, 7, 0, (3, 0, 1)),
    Case("a long text", 1, 40),
)


def sample(*, cached: bool, one_row: bool) -> Case:
    """Return the call that is traced: sizes are different and above 1, so that a tracer neither confuses nor fixes axes."""
    batch = 1 if one_row else 2
    return Case("the sample", batch, 3, 5, (2,)) if cached else Case("the sample", batch, 6, 0, (0, 2)[:batch])


def cases(*, cached: bool, one_row: bool, positions: int, thresholds: tuple[int, ...], longest: int) -> Iterator[Case]:
    """Yield the calls that a model of these sizes can take."""
    limit = min(positions, longest)
    beyond = [each + BEYOND for each in thresholds]
    candidates = [
        *(_DECODER if cached else _TEXT),
        *(Case(f"a text beyond {size - BEYOND} tokens", 1, size) for size in beyond),
        *(Case(f"one token beyond {size - BEYOND} tokens", 1, 1, size - 1) for size in beyond if cached),
    ]
    for case in candidates:
        if case.past + case.sequence <= limit and (case.batch == 1 or not one_row):
            yield case


def first_unproven_length(*, positions: int, thresholds: tuple[int, ...], longest: int) -> int:
    """Return the first number of tokens beyond which the model computes otherwise and no call is compared; 0 if there is none."""
    beyond = [each for each in thresholds if each < positions and each + BEYOND > min(positions, longest)]
    return beyond[0] if beyond else 0
