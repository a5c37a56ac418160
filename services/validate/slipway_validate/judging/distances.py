"""Measure the distance between two models by their family's comparison, and limit the distances of an output.

The measure compares distributions from logits, or other values: embeddings, or the score of a regression. Most limits follow from what was
measured on this model and text; the rest are here, with their source.

*Derived* (``docs/verdicts.md``): an output may differ from PyTorch on its own stored weights by :data:`FLOOR` plus :data:`NOISE_TIMES` the
noise: the change on the reference when the inputs of products are rounded as the output's runtime rounds them. If the stored weights are
not read, or another model is the yardstick, :data:`COST_TIMES` the cost is added: the change when the weights are rounded to the nearest of
the output's level, and beside the reference also when they are rounded to the merged model's type.

*Stored weights* (``slipway.validation.survival``) are judged module by module, beyond four standard errors of the rounding, by limits of
each type, because a module's relative error does not grow with the depth of a model. Measured on a trained sample (float32, 28 modules),
worst module: strength wrong by 1e-5 in float16, 2e-4 in int8, 8e-3 in int4 (its scales, fitted by least squares, are a little small);
weights off by 2e-4, 5e-3 and 8e-2. A lost update has a strength of 0, another layer's weight an error of 1.4. 16-bit types lose updates
that are smaller than their steps: bfloat16 holds 92 % of an update of 0.3 % of the weights, and 52 % of one of 0.1 %. An output may lack
what the base's own type cannot hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from slipway.model.families import Comparison
from slipway.proof.numerics import Floats, LogitComparer, Logits, blocks, finite
from slipway.validation.comparisons import LogitComparison
from slipway.validation.speed import Engine
from slipway.validation.verdicts import LimitOverrides, Limits

FLOOR = 1e-6
"""Mean KL, nats per token, of float32 arithmetic in another order. Measured: 4e-11 between PyTorch and ONNX Runtime or OpenVINO on a real model of
30 layers, and 1e-9 on deep ones; the smallest fault of a graph that is known, a rotary base rounded to 16 bits, makes 1e-4."""
VALUES_FLOOR = 1e-8
"""The same for values that are not logits: the square of a relative error."""
NOISE_TIMES, COST_TIMES = 4.0, 4.0
"""Times that measured noise and cost may be exceeded: the runtime rounds at other places than the measurement (attention, norms), and a few
hundred tokens scatter."""
_RARE = 4.26
"""Standard errors that one right output in 100,000 exceeds."""
CASE_TIMES = 2.0
"""A shape case has few positions, and both sides of it are rounded."""
EXACT_DIFFERENCE = 1e-4
"""Largest difference of a logit of float32 outputs, as a share of the reference's logit scale."""
NOISE_FACTOR = 32.0
"""Times the reference's own arithmetic noise to which that limit is raised, because deep models round more. The noise is the largest of a few
positions, and the difference the largest of all: a right merge of Gemma 3n with 25 layers is 13 times as far."""
MAX_NOISE_SHARE = 1e-3
"""Share of the logit scale above which a difference of the reference from itself is no noise: the shape changes its results, and is left out."""
# fmt: off
_MODULES: tuple[tuple[str, float, float, float], ...] = (
    # level,         module_strength, module_weight, quality_loss
    ("float32",      1e-2,            1e-5,          0.0),
    ("float16",      1e-1,            2e-3,          0.005),
    ("bfloat16",     2e-1,            1e-2,          0.01),
    ("int8",         1e-1,            5e-2,          0.02),
    ("w8a8",         1e-1,            7e-2,          0.02),
    ("int8_static",  1e-1,            7e-2,          0.02),
    ("int8_dynamic", 1e-1,            7e-2,          0.02),
    ("fp8",          1.5e-1,          2.5e-1,        0.03),
    ("fp8_static",   1.5e-1,          2.5e-1,        0.03),
    ("int4",         2e-1,            8e-1,          0.05),
    ("8da4w",        2e-1,            8e-1,          0.05),
    ("nvfp4",        2e-1,            8e-1,          0.05),
    ("mxfp4",        2e-1,            8e-1,          0.07),
    ("int3",         2.5e-1,          8e-1,          0.1),
)
# fmt: on
LIMITS: Mapping[str, Limits] = {
    level: Limits(level=level, module_strength_error=strength, module_weight_error=weight, quality_loss=quality)
    for level, strength, weight, quality in _MODULES
}
"""Limits of the stored weights and of scores of answers, from the tightest level to the loosest."""


class VectorComparer:
    """Compares two models' values: :meth:`add` each window, then get the :meth:`result`."""

    def __init__(self) -> None:
        self._width = 0
        self._values = 0
        self._sum_abs = self._max_abs = 0.0
        self._error = self._square = 0.0
        self._distances: list[Floats] = []

    def add(self, other: Logits, own: Logits) -> None:
        """Add one window. other, own: (P, H), the same positions.

        Raises:
            ValueError: The shapes differ.
        """
        if other.shape != own.shape:
            raise ValueError(f"values have shapes {other.shape} and {own.shape}")
        self._width = own.shape[-1]
        self._values += own.size
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            for rows in blocks(*own.shape):
                self._add_block(other[rows].astype(np.float64), own[rows].astype(np.float64))

    def _add_block(self, other: Floats, own: Floats) -> None:
        difference = np.abs(own - other)
        self._sum_abs += float(difference.sum())
        self._max_abs = float(np.maximum(self._max_abs, difference.max()))  # keeps NaN, which max() may lose
        self._error += float(np.square(difference).sum())
        self._square += float(np.square(other).sum())
        lengths = np.linalg.norm(other, axis=-1) * np.linalg.norm(own, axis=-1)
        nothing = np.where((other == own).all(axis=-1), 1.0, 0.0)  # a vector without length has no direction
        cosines = np.where(lengths == 0, nothing, (other * own).sum(axis=-1) / lengths)
        self._distances.append(np.maximum(1.0 - cosines, 0.0))

    def result(self) -> LogitComparison:
        """Return all figures over all added windows; a single value has no direction and therefore no cosine.

        Raises:
            ValueError: Nothing was added.
        """
        if not self._values:
            raise ValueError("no values were compared")
        distances = np.concatenate(self._distances)
        return LogitComparison(
            tokens=len(distances),
            max_abs_diff=finite(self._max_abs),
            mean_abs_diff=finite(self._sum_abs / self._values),
            cosine_distance=finite(distances.mean()) if self._width > 1 else None,
            max_cosine_distance=finite(distances.max()) if self._width > 1 else None,
            relative_error=self._relative_error(),
        )

    def _relative_error(self) -> float | None:
        if self._error == 0:
            return 0.0
        return (
            finite(math.sqrt(self._error / self._square)) if self._square > 0 and math.isfinite(self._error) else None
        )


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
        return Measure(VectorComparer, logits=False, many=False, weak_effect=1e-4)
    many = comparison is Comparison.NEXT_TOKEN
    return Measure(LogitComparer, logits=True, many=many, weak_effect=1e-3)


def distance_of(figures: LogitComparison | None) -> float | None:
    """Return one figure for the distance of two models, which grows with the square of the difference, as KL does; None: unknown."""
    if figures is None:
        return None
    if figures.relative_error is not None:
        return figures.relative_error**2
    return figures.mean_kl


def limits_by_level(overrides: Mapping[str, LimitOverrides]) -> dict[str, Limits]:
    """Return the absolute limits by level, with those that were asked for."""
    return {
        level: limits.model_copy(update=overrides[level].model_dump(exclude_none=True))
        if level in overrides
        else limits
        for level, limits in LIMITS.items()
    }


def level_of(stored_dtype: str) -> str:
    """Return the row of the table for a stored data type; an unknown one is judged as float32, the tightest."""
    return stored_dtype if stored_dtype in LIMITS else "float32"


def own_level(engine: Engine | None) -> str:
    """Return the row of the table for an output's own weights."""
    return level_of(engine.stored_dtype if engine else "")


def coarser(first: str, second: str) -> str:
    """Return the level that rounds more."""
    order = list(LIMITS)
    return max(first, second, key=order.index)


def times_allowed(usual: float, values: int) -> float:
    """Return how many times a measured distance may be exceeded, more than usual if it was measured on few values.

    Distances are sums of squares, so half the logarithm of the ratio of two right ones is nearly normal, with a variance of 1/values
    (Fisher, "On a Distribution Yielding the Error Functions of Several Well Known Statistics", 1924). A classifier has a few values per text.
    """
    return max(usual, math.exp(2 * _RARE / math.sqrt(max(1, values))))


def absolute_limit(share: float, *, logit_scale: float, noise: float | None) -> float:
    """Return the largest allowed difference of a logit.

    The noise of a deep model with sparse layers (Gemma 3n) may be near :data:`MAX_NOISE_SHARE`, and a merge in float32 rounds as much.
    """
    return max(share * logit_scale, NOISE_FACTOR * (noise or 0.0))
