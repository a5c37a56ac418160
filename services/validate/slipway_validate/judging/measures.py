"""Choose the measure between two models by their family's comparison: distributions from logits, or other values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipway.model.families import Comparison
from slipway.validation.comparisons import LogitComparison
from slipway_validate.numerics import LogitComparer
from slipway_validate.vectors import VectorComparer


@dataclass(frozen=True, slots=True)
class Measure:
    """How results are compared.

    Attributes:
        comparer: Computes the figures.
        logits: Whether results are logits: softmax ignores a constant added to all logits of a position.
        many: Whether there are so many results (next tokens) that near ties and noise along the adapter's effect do not matter.
        weak_effect: Distance of base and reference below which the adapter has almost no effect.
    """

    comparer: Callable[[], LogitComparer | VectorComparer]
    logits: bool
    many: bool
    weak_effect: float


def choose_measure(comparison: Comparison, *, width: int) -> Measure:
    """Choose how results of ``width`` values are compared; a single class is a score and not a class."""
    if comparison is Comparison.EMBEDDINGS or (comparison is Comparison.CLASSES and width == 1):
        return Measure(
            VectorComparer,
            logits=False,
            many=False,
            weak_effect=1e-4,
        )
    many = comparison is Comparison.NEXT_TOKEN
    return Measure(LogitComparer, logits=True, many=many, weak_effect=1e-3)


def distance_of(figures: LogitComparison | None) -> float | None:
    """Return one figure for the distance of two models, which grows with the square of the difference, as KL does; None: unknown."""
    if figures is None:
        return None
    if figures.relative_error is not None:
        return figures.relative_error**2
    return figures.mean_kl
