"""A part of divided work, and the files that its join takes over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of divided work: its number, from 1, and how many there are."""

    number: int
    of: int

    @property
    def is_first(self) -> bool:
        """Whether it is the part that also makes what there is once."""
        return self.number == 1

    def share_of(self, items: Sequence[T]) -> tuple[T, ...]:
        """Return the items that this part works on: as many as the others have, next to each other."""
        first, end = (len(items) * number // self.of for number in (self.number - 1, self.number))
        return tuple(items[first:end])


@dataclass(frozen=True, slots=True)
class Adopted:
    """A file of an input that becomes a file of the main output, although the stage has not read it.

    Attributes:
        input: Name of the input.
        path: Path of the file in the input and in the output.
        digest: Digest that it must have.
    """

    input: str
    path: str
    digest: str
