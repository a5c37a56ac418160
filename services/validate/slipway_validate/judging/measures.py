"""What is measured between two models, by how their family is compared: distributions that logits are, or values that are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipway.models.families import Comparison
from slipway.validation.comparisons import LogitComparison
from slipway.validation.limits import Limits
from slipway_validate.numerics import LogitComparer
from slipway_validate.vectors import VectorComparer


@dataclass(frozen=True, slots=True)
class Measure:
    """How results are compared.

    Attributes:
        comparer: Takes the figures.
        logits: Whether results are logits: softmax ignores what is added to all of a position.
        many: Whether there are so many that near ties, and how noise lies to the adapter's effect, do not count: next tokens.
        limit: Distance (see :func:`distance_of`) that the limits allow.
        weak_effect: Distance of base and reference below which the adapter hardly changes anything.
    """

    comparer: Callable[[], LogitComparer | VectorComparer]
    logits: bool
    many: bool
    limit: Callable[[Limits], float]
    weak_effect: float


def measure_of(comparison: Comparison, *, width: int) -> Measure:
    """How results of ``width`` values are compared; one class is no class but a score."""
    if comparison is Comparison.EMBEDDINGS or (comparison is Comparison.CLASSES and width == 1):
        return Measure(
            VectorComparer,
            logits=False,
            many=False,
            limit=lambda limits: (limits.relative_error or 0.0) ** 2,
            weak_effect=1e-4,
        )
    many = comparison is Comparison.NEXT_TOKEN
    return Measure(LogitComparer, logits=True, many=many, limit=lambda limits: limits.mean_kl, weak_effect=1e-3)


def distance_of(figures: LogitComparison | None) -> float | None:
    """One figure for how far apart two models are, that grows with the square of the difference as KL does; None: not known."""
    if figures is None:
        return None
    if figures.relative_error is not None:
        return figures.relative_error**2
    return figures.mean_kl
