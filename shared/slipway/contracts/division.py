"""The contract of a stage whose work can be divided into several tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from slipway.stage import Context, StageParams

P = TypeVar("P", bound="StageParams")
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


@dataclass(frozen=True, slots=True)
class Division(Generic[P]):
    """How the work of a stage is divided into parts, each a task of its own, and how one more task joins them (:mod:`slipway.division`).

    The joined output has the bytes of the undivided one, file by file.

    Attributes:
        most: Returns into how many parts a task can be divided, by its parameters, the names of its inputs, and the bytes of its
            model's weights; 1 if it cannot.
        run: Does a part: as :attr:`slipway.stage.Stage.run`, but it gets the part before the context, and returns one folder.
        join: Joins the folders of all parts, given by the names of the inputs in order: returns the folder of the main output.
        adopts: Patterns of the paths of the parts' files that the join does not read, but adopts into its output
            (:meth:`slipway.stage.Context.adopt`). They are not fetched, and stored once.
    """

    most: Callable[[P, Collection[str], int], int]
    run: Callable[[Mapping[str, Path], P, Part, Context], Path]
    join: Callable[[Mapping[str, Path], P, Context], Path]
    adopts: tuple[str, ...]
