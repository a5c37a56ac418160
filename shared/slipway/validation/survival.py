"""How much of the adapter each adapted module of an output still holds.

W is the base's weight, Δ the adapter's update of it, and Q(W + Δ) the weight that an output stores, as its runtime computes with it.
The change D = Q(W + Δ) - W is compared with Δ. Q(W) would be the other choice, but no output holds it: it needs a grid of its own,
whose rounding adds as much noise again. Rounding noise is uncorrelated with what is rounded (Widrow and Kollár, Quantization Noise,
2008, ch. 5), so the projection of D on Δ, the *strength*, stays 1 however coarse the grid is, and is 0 without the adapter. That holds unless
W lies on a grid itself; then what the nearest rounding makes of Δ is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from slipway.validation.verdicts import Value

_MOST_DROWNED = 256
_ROUNDING_TIMES = 1.5
"""Largest error of a calibrated rounding, as a multiple of the nearest rounding's: calibration keeps results, not weights."""


class ModuleSurvival(Value):
    """What an output holds of the adapter in one module.

    Attributes:
        module: Name of the module in the model, such as ``model.layers.3.self_attn.q_proj``.
        layer: Number of its layer; None for a module outside of the layers.
        strength: Share of the update that is there, ⟨D, Δ⟩ / ⟨Δ, Δ⟩: 1 is right, 0 is lost. None if the update is zero or a value is not
            finite.
        expected: The strength of W + Δ rounded to the base's own type, which a merge keeps: below 1 where steps of 16 bits are larger than
            the update.
        nearest_strength: Strength of W + Δ rounded to the nearest on the output's own grid. Measured where the strength is not the expected one,
            or the weight error is above its limit: a base whose values lie on a grid, because it was made from a quantized file, is no
            continuous weight. On its own grid rounding takes back what is smaller than half a step, and on another a small update may decide
            between two steps. None if not measured.
        noise: Standard error of the strength: it is large where the update is small beside the rounding.
        cosine: Cosine of D and Δ: how much of the change is the adapter and not rounding.
        changed: Share of the stored values (codes of a quantized weight) that differ from those of W on the same grid.
        weight_error: ‖D - Δ‖ / ‖W + Δ‖: the rounding, or a wrong weight.
        nearest_error: Weight error of the same rounding.
        weight_of: The module whose weight is stored here instead; empty if there is none.
        update_of: The module whose update was merged here instead; empty if there is none.
        fault: Why the module fails; empty if it passes.
    """

    module: str
    layer: int | None = None
    strength: float | None = None
    expected: float = 1.0
    nearest_strength: float | None = None
    noise: float | None = None
    cosine: float | None = None
    changed: float | None = None
    weight_error: float | None = None
    nearest_error: float | None = None
    weight_of: str = ""
    update_of: str = ""
    fault: str = ""

    @property
    def off_by(self) -> float:
        """Return how far the strength is from what a right module may have, between ``expected`` and ``nearest_strength``."""
        strength = self.strength or 0.0
        nearest = self.expected if self.nearest_strength is None else self.nearest_strength
        return max(0.0, min(nearest, self.expected) - strength, strength - max(nearest, self.expected))

    @property
    def unexplained_error(self) -> float | None:
        """Return the part of the weight error that rounding on the output's own grid does not explain; None if the error is not known.

        Errors that have nothing to do with each other add in squares.
        """
        if self.weight_error is None or self.nearest_error is None:
            return self.weight_error
        return math.sqrt(max(0.0, self.weight_error**2 - (_ROUNDING_TIMES * self.nearest_error) ** 2))

    @property
    def exchanged(self) -> bool:
        """Return whether the weight or the update of another module lies here."""
        return bool(self.weight_of or self.update_of)


class AdapterSurvival(Value):
    """What an output holds of the adapter.

    Attributes:
        modules: Its adapted modules, in the model's order.
        left_out: Adapted modules that were not compared, with the reason.
        non_finite: Stored tensors that hold NaN or infinity, with how many.
        rounded_routers: Routers of a mixture that are stored more coarsely than in 16 bits, adapted or not.
        not_run: Why nothing was compared; empty if something was.
    """

    modules: tuple[ModuleSurvival, ...] = ()
    left_out: dict[str, str] = Field(default_factory=dict)
    non_finite: dict[str, int] = Field(default_factory=dict)
    rounded_routers: tuple[str, ...] = ()
    not_run: str = ""

    @property
    def faulty(self) -> tuple[ModuleSurvival, ...]:
        """Return the modules that fail."""
        return tuple(each for each in self.modules if each.fault)

    @property
    def drowned(self) -> tuple[ModuleSurvival, ...]:
        """Return the quarter of the modules, at least one, whose update is most hidden by rounding: those with the smallest cosine."""
        known = [each for each in self.modules if each.cosine is not None]
        ordered = sorted(known, key=lambda each: (each.cosine or 0.0, each.module))
        return tuple(ordered[: min(_MOST_DROWNED, -(-len(ordered) // 4))])

    def by_layer(self) -> dict[int, tuple[ModuleSurvival, ...]]:
        """Return the modules of each layer, by number."""
        layers: dict[int, list[ModuleSurvival]] = {}
        for each in self.modules:
            if each.layer is not None:
                layers.setdefault(each.layer, []).append(each)
        return {number: tuple(layers[number]) for number in sorted(layers)}


def worst(modules: Sequence[ModuleSurvival], count: int) -> tuple[ModuleSurvival, ...]:
    """Return the modules that hold least of the adapter, or far too much of it, the worst first."""

    def distance(each: ModuleSurvival) -> tuple[float, str]:
        return (-each.off_by, each.module)

    return tuple(sorted(modules, key=distance)[:count])
