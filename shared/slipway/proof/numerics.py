"""Measure the distance between two sets of logits, accumulated over tokens in float64.

Shapes: T = positions (tokens), V = values of a position (the vocabulary, classes). Logits arrive one window at a time and are
processed in blocks of rows, so that memory is bounded for all T and V. A figure that is not finite becomes None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from slipway.validation.comparisons import LogitComparison

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BLOCK_VALUES = 1 << 17
"""Logits of the positions that are compared at a time."""
PART_VALUES = 1 << 14
"""Those of them that are in float64 at a time: 128 KiB per array, so that a dozen arrays fit into the cache of one core."""
POSITION_PARTS = 32
"""Most parts of a window for the divergence by position."""
SHORTEST_SPLIT = 8
"""Fewest positions of a window that is split."""
NEAR_TIE = 0.05
"""Choices whose probabilities differ by at most this count as equal: rounding may turn one into the other."""


def finite(value: float) -> float | None:
    """Return the value, or None if it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Yield slices over ``rows`` rows of ``width`` values, each of at most BLOCK_VALUES values but at least one row."""
    step = max(1, BLOCK_VALUES // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def parts(width: int, rows: int) -> Iterator[slice]:
    """Yield slices over ``width`` values, each of at most PART_VALUES values in ``rows`` rows."""
    step = max(1, PART_VALUES // max(rows, 1))
    for start in range(0, width, step):
        yield slice(start, min(start + step, width))


class Block:
    """Logits of some positions with what every comparison of them needs, computed once and part by part. logits: (T, V).

    Attributes:
        logits: As given.
        best: Place of the largest of each position, (T,).
        largest: The largest of each position in float64, (T,).
        total: Sum of exp(z - largest z) of each position over the parts so far, (T,).
    """

    def __init__(self, logits: Logits) -> None:
        self.logits = logits
        self.best = logits.argmax(axis=-1)
        self.largest: Floats = self.at(self.best)
        self.total: Floats = np.zeros(len(logits))

    def part(self, columns: slice) -> tuple[Floats, Floats]:
        """Return some values of each position in float64, and exp(z - largest z) of them, which divided by :attr:`total` are probabilities."""
        wide = self.logits[:, columns].astype(np.float64)
        weights = wide - self.largest[:, None]
        np.exp(weights, out=weights)
        self.total += weights.sum(axis=-1)
        return wide, weights

    def at(self, places: Ints) -> Floats:
        """Return one value of each of the first positions in float64. places: (L,) -> (L,)."""
        return self.logits[np.arange(len(places)), places].astype(np.float64)

    def log_total(self) -> Floats:
        """Return log Σ exp z, (T,), after the last part."""
        return self.largest + np.log(self.total)

    def losses(self, labels: Ints) -> Floats:
        """Compute -log p(label) of the first positions, in nats, after the last part. labels: (L,) -> (L,)."""
        return self.log_total()[: len(labels)] - self.at(labels)


class LogitComparer:
    """Compares two models' logits: :meth:`add` each window, then get the :meth:`result`."""

    def __init__(self) -> None:
        self._tokens = 0
        self._values = 0
        self._sum_abs = 0.0
        self._max_abs = 0.0
        self._same_top1 = 0
        self._same_choice = 0
        self._along: Floats = np.zeros(1)
        self._parts: list[Floats] = []
        self._kl: list[Floats] = []

    def add(self, other: Logits, own: Logits) -> None:
        """Add one window. other, own: (T, V), the same positions.

        Raises:
            ValueError: The shapes differ.
        """
        if other.shape != own.shape:
            raise ValueError(f"logits have shapes {other.shape} and {own.shape}")
        with np.errstate(invalid="ignore", over="ignore"):
            for rows in blocks(*own.shape):
                theirs, ours = Block(other[rows]), Block(own[rows])
                for columns in parts(own.shape[1], len(ours.logits)):
                    self.add_part(theirs.part(columns), ours.part(columns)[0])
                self.end_block(theirs, ours)
        self.end_window()

    def add_part(self, other: tuple[Floats, Floats], own: Floats) -> None:
        """Add some values of each position of a block. other: values and weights of :meth:`Block.part`, own: values; (T, v)."""
        wide, weights = other
        difference = wide - own
        self._along = self._along + np.einsum("tv,tv->t", weights, difference)
        np.abs(difference, out=difference)
        self._sum_abs += float(difference.sum())
        self._max_abs = float(np.maximum(self._max_abs, difference.max()))  # keeps NaN, which max() may lose
        self._values += difference.size

    def end_block(self, other: Block, own: Block) -> None:
        """End the block of the last parts.

        KL(p ‖ q) = Σ p (log p - log q) = Σ p (z_p - z_q) - log Σ exp z_p + log Σ exp z_q, in nats.
        Source: Kullback & Leibler, "On Information and Sufficiency", 1951. A result just below zero, from rounding, becomes 0.
        """
        kl = self._along / other.total - other.log_total() + own.log_total()
        self._along = np.zeros(1)
        self._parts.append(np.maximum(kl, 0.0))
        self._same_top1 += int((other.best == own.best).sum())
        lost = (1.0 - np.exp(other.at(own.best) - other.largest)) / other.total
        self._same_choice += int((lost <= NEAR_TIE).sum())
        self._tokens += len(kl)

    def end_window(self) -> None:
        """End the window of the last blocks."""
        self._kl.append(np.concatenate(self._parts))
        self._parts = []

    def absorb(self, other: LogitComparer) -> None:
        """Add the windows of another comparer after those so far."""
        self._tokens += other._tokens
        self._values += other._values
        self._sum_abs += other._sum_abs
        self._max_abs = float(np.maximum(self._max_abs, other._max_abs))
        self._same_top1 += other._same_top1
        self._same_choice += other._same_choice
        self._kl += other._kl

    def result(self) -> LogitComparison:
        """Return all figures over all added windows.

        Raises:
            ValueError: Nothing was added.
        """
        if not self._tokens:
            raise ValueError("no logits were compared")
        kl = np.concatenate(self._kl)
        return LogitComparison(
            tokens=self._tokens,
            max_abs_diff=finite(self._max_abs),
            mean_abs_diff=finite(self._sum_abs / self._values),
            mean_kl=finite(kl.mean()),
            max_kl=finite(kl.max()),
            kl_quantiles={f"p{percent}": _quantile(kl, percent) for percent in (50, 90, 99)},
            kl_per_window=tuple(finite(window.mean()) for window in self._kl),
            kl_by_position=tuple(finite(part.mean()) for part in _by_position(self._kl)),
            top1_agreement=self._same_top1 / self._tokens,
            choice_agreement=self._same_choice / self._tokens,
        )


def _by_position(windows: Sequence[Floats]) -> list[Floats]:
    """Split windows of one length into POSITION_PARTS parts by position; none if they are too short to have a begin and an end."""
    lengths = {len(window) for window in windows}
    if len(lengths) > 1 or min(lengths) < SHORTEST_SPLIT:
        return []
    return np.array_split(np.stack(windows).T, min(POSITION_PARTS, len(windows[0])))


def _quantile(values: Floats, percent: int) -> float | None:
    return float(np.percentile(values, percent)) if np.isfinite(values).all() else None


def negative_log_likelihood(logits: Logits, labels: Ints) -> Floats:
    """Compute -log p(label) of each label, in nats. logits: (P, V), of which the first L are used; labels: (L,) -> (L,)."""
    with np.errstate(invalid="ignore", over="ignore"):
        losses = [_losses(logits[rows], labels[rows]) for rows in blocks(len(labels), logits.shape[-1])]
    return np.concatenate(losses) if losses else np.zeros(0)


def _losses(logits: Logits, labels: Ints) -> Floats:
    block = Block(logits)
    for columns in parts(logits.shape[-1], len(logits)):
        block.part(columns)
    return block.losses(labels)


def window_losses(logits: npt.NDArray[np.float32], labels: Ints) -> Floats:
    """Compute the mean negative log-likelihood per label of each window, in nats. logits: (N, P, V), labels: (N, L) -> (N,)."""
    return np.array([negative_log_likelihood(window, ids).mean() for window, ids in zip(logits, labels, strict=True)])


def perplexity_of(losses: Floats) -> float | None:
    """Compute the perplexity of windows of equal length from their mean losses. losses: (N,). Source: Jelinek et al., 1977."""
    mean = float(losses.mean())
    return finite(math.exp(mean)) if math.isfinite(mean) and mean < 700 else None  # exp overflows beyond 709


def logit_scale(logits: npt.NDArray[np.float32]) -> float:
    """Compute the root mean square of all logits, at least 1. logits: (N, T, V).

    Limits of differences are relative to it, because float rounding is relative. It is never below 1: otherwise the small
    logits of an untrained model would require more digits than its intermediate values have.
    """
    total = sum(float(np.square(window, dtype=np.float64).sum()) for window in logits)
    return max(1.0, math.sqrt(total / logits.size)) if math.isfinite(total) else 1.0


class StrengthMeter:
    """Measures an output's share of the adapter's effect on the results: 1 all of it, 0 none, above 1 too much.

    The least-squares c in own - base ≈ c (reference - base). Logits are centred per position because softmax ignores a shift;
    other values are not. Rounding noise is nearly orthogonal to the adapter's effect, so c shows a wrong scale that KL at 4
    bits hides. Networks are not linear: a scale wrong by a tenth moves c by about half of that.
    """

    def __init__(self, *, centred: bool) -> None:
        self._centred = centred
        self._along = self._square = 0.0
        self._sums: list[Floats] = []  # of the output's and the adapter's effect at each position, by part
        self._width = 0

    def add(self, base: Floats, reference: Floats, own: Floats) -> None:
        """Add some values of some positions in float64. base, reference, own: (T, v)."""
        effect, own_effect = reference - base, own - base
        # By einsum and not by a product of BLAS, whose threads would spin for a sum that takes microseconds.
        self._along += float(np.einsum("tv,tv->", own_effect, effect))
        self._square += float(np.einsum("tv,tv->", effect, effect))
        if self._centred:
            self._sums.append(np.stack([own_effect.sum(axis=-1), effect.sum(axis=-1)]))
            self._width += effect.shape[-1]

    def end_block(self) -> None:
        """End the block of these positions, whose values are all added. Σ (f - mean f)(e - mean e) = Σ f e - V mean f mean e."""
        if not self._sums:
            return
        own_effect, effect = np.sum(self._sums, axis=0)
        self._along -= float((own_effect * effect).sum()) / self._width
        self._square -= float((effect * effect).sum()) / self._width
        self._sums, self._width = [], 0

    def absorb(self, other: StrengthMeter) -> None:
        """Add the complete blocks of another meter."""
        self._along += other._along
        self._square += other._square

    def result(self) -> float | None:
        """Return the share; None if the adapter has no effect or a value is not finite."""
        return finite(self._along / self._square) if math.isfinite(self._square) and self._square > 0 else None


def adapter_strength(base: Logits, reference: Logits, own: Logits, *, centred: bool = True) -> float | None:
    """Measure the adapter's strength (:class:`StrengthMeter`) over all windows. base, reference, own: (N, P, V)."""
    meter = StrengthMeter(centred=centred)
    for windows in zip(base, reference, own, strict=True):
        for rows in blocks(*windows[0].shape):
            meter.add(*(window[rows].astype(np.float64) for window in windows))
            meter.end_block()
    return meter.result()


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading tokens that both sequences share."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
