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
"""Logits held in float64 at a time (1 MiB per array): several arrays fit into a processor's cache."""
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


class Block:
    """Logits of some positions with what every comparison of them needs, computed once. logits: (T, V).

    Attributes:
        logits: As given.
        wide: In float64.
        best: Place of the largest of each position, (T,).
        weights: exp(z - largest z); divided by :attr:`total`, the probabilities.
        total: Sum of the weights of each position, (T,).
        log_total: log Σ exp z, (T,).
    """

    def __init__(self, logits: Logits) -> None:
        self.logits = logits
        self.wide: Floats = logits.astype(np.float64)
        self.best = logits.argmax(axis=-1)
        rows = np.arange(len(logits))
        largest = self.wide[rows, self.best]
        self.weights = self.wide - largest[:, None]
        np.exp(self.weights, out=self.weights)
        self.total = self.weights.sum(axis=-1)
        self.log_total = largest + np.log(self.total)

    def losses(self, labels: Ints) -> Floats:
        """Compute -log p(label) of the first positions, in nats. labels: (L,) -> (L,)."""
        return self.log_total[: len(labels)] - self.wide[np.arange(len(labels)), labels]


class LogitComparer:
    """Compares two models' logits: :meth:`add` each window, then get the :meth:`result`."""

    def __init__(self) -> None:
        self._tokens = 0
        self._values = 0
        self._sum_abs = 0.0
        self._max_abs = 0.0
        self._same_top1 = 0
        self._same_choice = 0
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
                self.add_block(Block(other[rows]), Block(own[rows]))
        self.end_window()

    def add_block(self, other: Block, own: Block) -> None:
        """Add some positions of a window.

        KL(p ‖ q) = Σ p (log p - log q) = Σ p (z_p - z_q) - log Σ exp z_p + log Σ exp z_q, in nats.
        Source: Kullback & Leibler, "On Information and Sufficiency", 1951. A result just below zero, from rounding, becomes 0.
        """
        difference = other.wide - own.wide
        kl = np.einsum("tv,tv->t", other.weights, difference) / other.total - other.log_total + own.log_total
        self._parts.append(np.maximum(kl, 0.0))
        np.abs(difference, out=difference)
        self._sum_abs += float(difference.sum())
        self._max_abs = float(np.maximum(self._max_abs, difference.max()))  # keeps NaN, which max() may lose
        rows = np.arange(len(difference))
        self._same_top1 += int((other.best == own.best).sum())
        lost = (other.weights[rows, other.best] - other.weights[rows, own.best]) / other.total
        self._same_choice += int((lost <= NEAR_TIE).sum())
        self._tokens += difference.shape[0]
        self._values += difference.size

    def end_window(self) -> None:
        """Say that the window of the last blocks is complete."""
        self._kl.append(np.concatenate(self._parts))
        self._parts = []

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
        parts = [Block(logits[rows]).losses(labels[rows]) for rows in blocks(len(labels), logits.shape[-1])]
    return np.concatenate(parts) if parts else np.zeros(0)


def perplexity(logits: npt.NDArray[np.float32], labels: Ints) -> float | None:
    """Compute exp of the mean negative log-likelihood per label. logits: (N, P, V), labels: (N, L), N windows.

    Source: Jelinek et al., 1977.
    """
    return perplexity_of(window_losses(logits, labels))


def window_losses(logits: npt.NDArray[np.float32], labels: Ints) -> Floats:
    """Compute the mean negative log-likelihood per label of each window, in nats. logits: (N, P, V), labels: (N, L) -> (N,)."""
    return np.array([negative_log_likelihood(window, ids).mean() for window, ids in zip(logits, labels, strict=True)])


def perplexity_of(losses: Floats) -> float | None:
    """Compute the perplexity of windows of equal length from their mean losses. losses: (N,)."""
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

    def add(self, base: Floats, reference: Floats, own: Floats) -> None:
        """Add some positions in float64. base, reference, own: (T, V)."""
        effect, found = reference - base, own - base
        if self._centred:
            effect -= effect.mean(axis=-1, keepdims=True)
            found -= found.mean(axis=-1, keepdims=True)
        self._along += float(np.vdot(found, effect))
        self._square += float(np.vdot(effect, effect))

    def result(self) -> float | None:
        """Return the share; None if the adapter has no effect or a value is not finite."""
        return finite(self._along / self._square) if math.isfinite(self._square) and self._square > 0 else None


def adapter_strength(base: Logits, reference: Logits, own: Logits, *, centred: bool = True) -> float | None:
    """Measure the adapter's strength (:class:`StrengthMeter`) over all windows. base, reference, own: (N, P, V)."""
    meter = StrengthMeter(centred=centred)
    for windows in zip(base, reference, own, strict=True):
        for rows in blocks(*windows[0].shape):
            meter.add(*(window[rows].astype(np.float64) for window in windows))
    return meter.result()


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading tokens that both sequences share."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
