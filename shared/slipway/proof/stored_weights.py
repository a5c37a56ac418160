"""Stored weights of outputs: dense values, or codes with scales, a few rows at a time.

Axes: N output features, K input features, R some of the N, G groups of a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

_LEAST = 1e-37
"""Smallest scale that has an inverse."""
_NUMBER = re.compile(r"(?:^|\.)\d+\.")


class NotUnderstoodError(Exception):
    """A folder or weight is stored in a form that is not known here; the message names it."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a stored weight.

    Attributes:
        values: What a runtime computes with. float32 (R, K)
        stored: Codes of a quantized weight, or the values in their stored type. (R, K)
        scales: Scale of each code; None for dense values. float32 (R, K)
        zeros: Code of zero of each; None for 0. float32 (R, K)
        limits: Smallest and largest code.
        levels: If the codes lie at uneven distances, as short floats do: all that there are, upwards; None for whole numbers. float32 (M,)
        grid: Function that returns the rows with their codes, if a reader computes the codes only on request; None otherwise.
    """

    values: Tensor
    stored: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    limits: tuple[int, int] = (0, 0)
    levels: Tensor | None = None
    grid: Callable[[], Rows] | None = None

    def changed_from(self, values: Tensor) -> int:
        """Count the stored entries that differ from other values (R, K) on the same grid."""
        other = values.to(self.stored.dtype) if self.scales is None else self.codes_of(values, self.scales)
        return int(torch.count_nonzero(other != self.stored))

    def nearest(self, values: Tensor) -> Tensor:
        """Return other values (R, K) rounded to the nearest on the same grid, of integers or of the stored float type.

        A value beyond the grid's ends, or where the grid has no step, stays as it is: a grid that ends too early explains no error.
        """
        if self.grid is not None:
            return self.grid().nearest(values)
        if self.scales is None:
            rounded = values.to(self.stored.dtype).float()
            return torch.where(rounded.isfinite(), rounded, values)
        places = self._places(values, self.scales)
        codes = self._nearest_codes(places)
        rounded = (codes if self.zeros is None else codes - self.zeros) * self.scales
        low, high = self._ends()
        known = (places > low) & (places < high) & (self.scales.abs() > _LEAST)
        return torch.where(known, rounded, values)

    def codes_of(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return the codes of other values (R, K) on a grid of these scales."""
        codes = self._nearest_codes(self._places(values, scales))
        return codes if self.levels is not None else codes.clamp(*self.limits).to(self.stored.dtype)

    def _places(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return where values lie among the codes, float32 (R, K)."""
        places = values * torch.where(scales.abs() > _LEAST, 1 / scales, torch.zeros(()))
        return places if self.zeros is None else places + self.zeros

    def _nearest_codes(self, places: Tensor) -> Tensor:
        if self.levels is None:
            return torch.round(places)
        ties = (self.levels[1:] + self.levels[:-1]) / 2
        below = torch.nextafter(ties, torch.tensor(-torch.inf))
        return self.levels[torch.bucketize(places, torch.where(ties < 0, below, ties))]  # a tie goes towards 0

    def _ends(self) -> tuple[float, float]:
        """Return half a step before the smallest code, and behind the largest."""
        if self.levels is None:
            return self.limits[0] - 0.5, self.limits[1] + 0.5
        first, second, before, last = self.levels[[0, 1, -2, -1]].tolist()
        return first - (second - first) / 2, last + (last - before) / 2

    def turned(self, rows: slice) -> Rows:
        """Return rows of the transposed weight."""
        grid = self.grid
        return replace(
            self,
            values=self.values.T[rows],
            stored=self.stored.T[rows],
            grid=None if grid is None else lambda: grid().turned(rows),
            scales=None if self.scales is None else self.scales.T[rows],
            zeros=None if self.zeros is None else self.zeros.T[rows],
        )


class StoredWeight(Protocol):
    """A weight of an output, (N, K)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (N, K)."""
        ...

    def take(self, rows: slice) -> Rows:
        """Read some rows."""
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    """Values in a stored float type, (N, K), mapped from their file."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (N, K)."""
        return tuple(self.values.shape)

    def take(self, rows: slice) -> Rows:
        """Read some rows."""
        stored = self.values[rows].contiguous()  # a graph may store it transposed
        return Rows(values=stored.float(), stored=stored)


@dataclass(frozen=True, slots=True)
class Coded:
    """Codes with a scale per group.

    Attributes:
        codes: Function that reads some rows of codes. int32 (R, K), or float32 for short floats
        scales: (N, G), or (N, 1) for a whole row.
        zeros: Codes of zero; None for 0. (N, G)
        limits: Smallest and largest code.
        shape: (N, K)
        levels: As :class:`Rows`.
    """

    codes: Callable[[slice], Tensor]
    scales: Tensor
    zeros: Tensor | None
    limits: tuple[int, int]
    shape: tuple[int, ...]
    levels: Tensor | None = None

    def take(self, rows: slice) -> Rows:
        """Read some rows."""
        codes = self.codes(rows)
        scales = self._spread(self.scales, rows)
        zeros = None if self.zeros is None else self._spread(self.zeros, rows)
        values = (codes if zeros is None else codes - zeros) * scales
        return Rows(values=values, stored=codes, scales=scales, zeros=zeros, limits=self.limits, levels=self.levels)

    def _spread(self, groups: Tensor, rows: slice) -> Tensor:
        size = self.shape[1] // groups.shape[1]
        taken = groups if len(groups) == 1 else groups[rows]  # one for all rows
        return taken.float()[:, :, None].expand(-1, -1, size).reshape(len(taken), -1)


@dataclass(frozen=True, slots=True)
class Smoothed:
    """A weight whose input features were multiplied by factors; reading undoes that.

    Attributes:
        weight: The stored weight.
        inverse: Factors that undo it. (K,)
    """

    weight: StoredWeight
    inverse: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (N, K)."""
        return self.weight.shape

    def take(self, rows: slice) -> Rows:
        """Read some rows."""
        smoothed, by = self.weight.take(rows), self.inverse.float()[None, :]
        return replace(
            smoothed, values=smoothed.values * by, scales=None if smoothed.scales is None else smoothed.scales * by
        )


@dataclass(frozen=True)
class Turned:
    """A weight that is stored transposed, seen as (N, K)."""

    weight: StoredWeight

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (N, K)."""
        return tuple(reversed(self.weight.shape))

    def take(self, rows: slice) -> Rows:
        """Read some rows; the first time, all of the stored weight is read."""
        return self._whole.turned(rows)

    @cached_property
    def _whole(self) -> Rows:
        return self.weight.take(slice(None))


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a weight in which several linear layers are joined."""

    weight: StoredWeight
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (N, K)."""
        return (self.stop - self.start, *self.weight.shape[1:])

    def take(self, rows: slice) -> Rows:
        """Read some rows."""
        begin, end, step = rows.indices(self.stop - self.start)
        return self.weight.take(slice(self.start + begin, self.start + end, step))


class StoredModel(Protocol):
    """The weights of an output's folder."""

    names: frozenset[str]
    """Names of its weights as the model has them, such as ``model.layers.0.mlp.up_proj.weight``."""

    def weight(self, name: str, *, turned: bool) -> StoredWeight:
        """Return one of them as (N, K).

        Args:
            name: One of ``names``.
            turned: Whether PyTorch stores this weight (K, N), as transformers' ``Conv1D`` does.

        Raises:
            NotUnderstoodError: It is stored in an unknown form.
        """
        ...

    def non_finite(self) -> dict[str, int]:
        """Return the tensors that hold NaN or infinity, with how many."""
        ...


class Names:
    """Finds a weight by its name, also where one of the two names lacks a prefix."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._ends: dict[str, list[str]] = {}
        for name in sorted(names):
            for end in _ends(name):
                self._ends.setdefault(end, []).append(name)

    def find(self, wanted: str) -> str | None:
        """Return the name that is equal, or the only one with the longest common end; None if there is none."""
        if wanted in self._names:
            return wanted
        for end in _ends(wanted):
            names = self._ends.get(end, [])
            if len(names) == 1 and (names[0] == end or end == wanted):
                return names[0]
        return None


def _ends(name: str) -> list[str]:
    """Return a name's ends, the longest first; one with layers ends no earlier than at its first number."""
    parts = name.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return [".".join(parts[start:]) for start in range(max(1, min(numbered, len(parts) - 1)) + 1)]


def is_mask(values: Tensor) -> bool:
    """Return whether a constant only tells places apart: infinity hides a token or an expert, and all other places hold one value."""
    infinite = torch.isinf(values)
    if not infinite.any():
        return False
    left = values[~infinite]
    return left.numel() == 0 or bool((left == left[0]).all())


def count_non_finite(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the tensors that hold NaN or infinity, with how many. Reads all of each, a piece at a time."""
    counts: dict[str, int] = {}
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        for start in range(0, flat.numel(), 1 << 24):
            piece = flat[start : start + (1 << 24)]
            low, high = torch.aminmax(piece)  # both are NaN if one value is; much faster than a test of each
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                counts[name] = counts.get(name, 0) + int((~torch.isfinite(piece)).sum())
    return counts
