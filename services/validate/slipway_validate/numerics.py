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

BLOCK_VALUES = 1 << 21
"""Logits held in float64 at a time (16 MiB per array)."""
POSITION_PARTS = 32
"""Most parts of a window for the divergence by position."""
SHORTEST_SPLIT = 8
"""Fewest positions of a window that is split."""
NEAR_TIE = 0.05
"""Choices whose probabilities differ by at most this count as equal: rounding may turn one into the other."""


def finite(value: float) -> float | None:
    """Return the value, or None if it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def log_softmax(logits: npt.NDArray[np.floating]) -> Floats:
    """Compute log-probabilities log p = z - log Σ exp z, stable by subtracting the maximum. logits: (T, V) -> (T, V)."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def kl_divergence(log_p: Floats, log_q: Floats) -> Floats:
    """Compute KL(p ‖ q) = Σ p (log p - log q) per row, in nats. log_p, log_q: (T, V) -> (T,).

    Source: Kullback & Leibler, "On Information and Sufficiency", 1951. A result just below zero, from rounding, becomes 0.
    """
    rows: Floats = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return np.maximum(rows, 0.0)


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Yield slices over ``rows`` rows of ``width`` values, each of at most BLOCK_VALUES values but at least one row."""
    step = max(1, BLOCK_VALUES // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class LogitComparer:
    """Compares two models' logits: :meth:`add` each window, then get the :meth:`result`."""

    def __init__(self) -> None:
        self._tokens = 0
        self._values = 0
        self._sum_abs = 0.0
        self._max_abs = 0.0
        self._same_top1 = 0
        self._same_choice = 0
        self._kl: list[Floats] = []

    def add(self, other: Logits, own: Logits) -> None:
        """Add one window. other, own: (T, V), the same positions.

        Raises:
            ValueError: The shapes differ.
        """
        if other.shape != own.shape:
            raise ValueError(f"logits have shapes {other.shape} and {own.shape}")
        kl = [self._add_block(other[rows], own[rows]) for rows in blocks(*own.shape)]
        self._kl.append(np.concatenate(kl))
        self._tokens += own.shape[0]
        self._values += own.size

    def _add_block(self, other: Logits, own: Logits) -> Floats:
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.abs(other.astype(np.float64) - own.astype(np.float64))
            self._sum_abs += float(difference.sum())
            self._max_abs = float(np.maximum(self._max_abs, difference.max()))  # keeps NaN, which max() may lose
            log_p, best, chosen = log_softmax(other), other.argmax(axis=-1), own.argmax(axis=-1)
            self._same_top1 += int((best == chosen).sum())
            rows = np.arange(len(other))
            self._same_choice += int((np.exp(log_p[rows, best]) - np.exp(log_p[rows, chosen]) <= NEAR_TIE).sum())
            return kl_divergence(log_p, log_softmax(own))

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
    parts = []
    for rows in blocks(len(labels), logits.shape[-1]):
        log_p, expected = log_softmax(logits[rows]), labels[rows]
        parts.append(-log_p[np.arange(len(expected)), expected])
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


def adapter_strength(base: Logits, reference: Logits, own: Logits, *, centred: bool = True) -> float | None:
    """Compute an output's share of the adapter's effect on the results: 1 all of it, 0 none, above 1 too much.

    The least-squares c in own - base ≈ c (reference - base). Logits are centred per position because softmax ignores a shift;
    other values are not. Rounding noise is nearly orthogonal to the adapter's effect, so c shows a wrong scale that KL at 4
    bits hides. Networks are not linear: a scale wrong by a tenth moves c by about half of that.
    base, reference, own: (N, P, V). None if the adapter has no effect or a value is not finite.
    """
    along, square = 0.0, 0.0
    for windows in zip(base, reference, own, strict=True):
        for rows in blocks(*windows[0].shape):
            start, end, found = (_wide(window[rows], centred=centred) for window in windows)
            effect = end - start
            along += float(np.vdot(found - start, effect))
            square += float(np.vdot(effect, effect))
    return finite(along / square) if math.isfinite(square) and square > 0 else None


def _wide(values: Logits, *, centred: bool) -> Floats:
    wide = values.astype(np.float64)
    return wide - wide.mean(axis=-1, keepdims=True) if centred else wide


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading tokens that both sequences share."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
