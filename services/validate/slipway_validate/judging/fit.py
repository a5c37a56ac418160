"""Judge how much of the fine-tune an output keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipway.validation.comparisons import Check
from slipway.validation.findings import OutputStatus, OutputValidation
from slipway.validation.verdicts import (
    CLOSE,
    KEEPS_ENOUGH,
    KEEPS_HALF,
    NEAR,
    WEAK_EFFECT,
    WEAK_ELSEWHERE,
    Answer,
    Verdict,
    kept_share,
)
from slipway_validate.judging import pictures
from slipway_validate.judging.distances import Measure, distance_of

_CLOSE_VALUES, _NEAR_VALUES = 0.1**2, 0.3**2
"""As :data:`slipway.validation.verdicts.CLOSE` and ``NEAR``, for values that are not logits: squares of relative errors."""
_ALONG, _LIKELY = 0.25, 2.0
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class FitRule:
    """How the fine-tune in an output is measured.

    Attributes:
        measure: How results are compared.
        effect: Distance of base and reference; None without an adapter.
        values: Number of values that are compared.
        place: Where the results lie if not on text alone, in words.
        elsewhere: Whether the text is built in, so that the fine-tune was not made for it.
    """

    measure: Measure
    effect: float | None
    values: int = 1 << 30
    place: str = ""
    elsewhere: bool = False

    @property
    def is_weak(self) -> bool:
        """Return whether the adapter moves the base so little that rounding noise may outweigh it."""
        least = (WEAK_ELSEWHERE if self.elsewhere else WEAK_EFFECT) if self.measure.logits else _CLOSE_VALUES
        return self.effect is None or self.effect < least

    @property
    def close(self) -> float:
        """Return the distance up to which an output passes."""
        return self._limit(1 - KEEPS_ENOUGH, CLOSE, _CLOSE_VALUES)

    @property
    def near(self) -> float:
        """Return the distance up to which it passes with a warning."""
        return self._limit(1 - KEEPS_HALF, NEAR, _NEAR_VALUES)

    def _limit(self, share: float, logits: float, values: float) -> float:
        if not self.is_weak and self.effect is not None:
            return share * self.effect
        return logits if self.measure.logits else values


def fit_checks(output: OutputValidation, rule: FitRule) -> list[Check]:
    """Return the checks that an output fails only if most of the fine-tune is lost."""
    distance = distance_of(output.to_reference)
    if output.to_reference is None:
        return []
    if not rule.is_weak:
        kept = kept_share(distance, rule.effect)
        return [_check("kept", kept, KEEPS_HALF, "share", at_least=True)]
    name, unit = ("mean_kl", "nats/token") if rule.measure.logits else ("relative_error", "share")
    root = 1.0 if rule.measure.logits else 0.5
    value = None if distance is None else distance**root
    checks = [_check(name, value, rule.near**root, unit)]
    if rule.effect and output.adapter_strength is not None:
        error, limit = abs(output.adapter_strength - 1), max(1 - KEEPS_HALF, _noise_along_effect(distance, rule))
        checks.append(_check("adapter_strength_error", error, limit, "share"))
    return checks


def fit_verdict(output: OutputValidation, rule: FitRule) -> Verdict:
    """Judge by its checks how much of the fine-tune an output keeps."""
    distance = distance_of(output.to_reference)
    checks = [
        check for check in output.checks if check.question == "fit" and not check.name.startswith(pictures.PREFIXES)
    ]
    if not checks or distance is None:
        failed = any(not check.passed for check in checks)
        return Verdict(answer=Answer.FAILED, said="its results are not finite numbers") if failed else Verdict()
    said = _describe(output, rule, distance)
    strength = 0.0 if output.adapter_strength is None or not rule.is_weak else abs(output.adapter_strength - 1)
    if not all(check.passed for check in checks):
        answer = Answer.FAILED
    elif distance > rule.close or strength > max(1 - KEEPS_ENOUGH, _noise_along_effect(distance, rule)):
        answer = Answer.WARNING
    else:
        answer = Answer.PASSED
    return Verdict(answer=answer, said=said, yardstick="reference")


def name_alternatives(outputs: Sequence[OutputValidation]) -> list[OutputValidation]:
    """Name the outputs that keep more in each verdict that too little is kept."""
    return [_name_alternatives(each, outputs) for each in outputs]


def _name_alternatives(output: OutputValidation, others: Sequence[OutputValidation]) -> OutputValidation:
    if output.fit.answer not in (Answer.FAILED, Answer.WARNING) or output.kept is None:
        return output
    if not any(check.name == "kept" for check in output.checks):
        return output  # another figure decided
    if any(each is not None and output.fit == each.fit for each in (output.pictures, output.sound)):
        return output  # what others keep on text says nothing of what is kept behind pictures or sound
    better = sorted(
        (
            each
            for each in others
            if (each.kept or 0.0) > output.kept and each.status is OutputStatus.PASSED and each.level != "none"
        ),
        key=lambda each: each.size_bytes,
    )
    if not better:
        return output
    named = ", ".join(f"{each.name} {_percent(each.kept or 0.0)}" for each in better[:_SHOWN])
    fit = output.fit.model_copy(update={"said": f"{output.fit.said}; of this export, {named}"})
    changed: dict[str, object] = {"fit": fit}
    before = output.fit.said.removeprefix("it ")
    if before in output.explanation:
        changed["explanation"] = output.explanation.replace(before, fit.said.removeprefix("it "))
    return output.model_copy(update=changed)


def _noise_along_effect(distance: float | None, rule: FitRule) -> float:
    """Return the error of the adapter's strength that noise explains: with few values, a part of it lies along the adapter's effect.

    About 1 / sqrt(n) of the noise in n values lies along any direction; measured on small models: up to a fifth.
    """
    if rule.measure.many or not rule.effect or distance is None:
        return 0.0
    return min(1.0, max(_ALONG, _LIKELY / math.sqrt(max(1, rule.values)))) * math.sqrt(distance / rule.effect)


def _describe(output: OutputValidation, rule: FitRule, distance: float) -> str:
    cost = (
        ""
        if output.level_cost is None
        else f"; the nearest rounding of these weights would be {_format_distance(output.level_cost, rule)} away"
    )
    if rule.effect is None:
        return f"it is {_format_distance(distance, rule)} away from the model{_at(rule)}{cost}"
    if output.kept is not None and not rule.is_weak:
        least = "" if output.level_cost is None else kept_share(output.level_cost, rule.effect)
        beside = "" if least in ("", None) else f" (the nearest rounding of these weights: {_percent(float(least))})"
        return f"it keeps {_percent(output.kept)} of what the fine-tune changed{_at(rule)}{beside}"
    shown = (
        "" if output.adapter_strength is None else f", with {output.adapter_strength:.2f} times the adapter's effect"
    )
    return (
        f"the adapter changes little {rule.place or _text(rule)} ({_format_distance(rule.effect, rule)}), so its direction and the distance decide: "
        f"{_format_distance(distance, rule)} away{shown}{cost}"
    )


def _text(rule: FitRule) -> str:
    return "on the built-in text, which it was not trained for" if rule.elsewhere else "on this text"


def _at(rule: FitRule) -> str:
    return f" {rule.place}" if rule.place else ""


def _format_distance(distance: float, rule: FitRule) -> str:
    return f"{distance:.2g} nats per token" if rule.measure.logits else f"{distance**0.5:.2g} of the values"


def _percent(share: float) -> str:
    """Show a share in percent, never more than it is: 84.6 % is not shown as the 85 % that pass."""
    percent = 100 * share
    if percent < 99.5:
        return f"{math.floor(percent + 1e-9)} %"
    return "100 %" if percent > 99.995 else f"{min(percent, 99.99):.2f} %"


def _check(name: str, value: float | None, limit: float, unit: str, *, at_least: bool = False) -> Check:
    passed = value is not None and (value >= limit if at_least else value <= limit)
    comparison = ">=" if at_least else "<="
    return Check.model_validate(
        {
            "name": name,
            "value": value,
            "limit": limit,
            "comparison": comparison,
            "passed": passed,
            "question": "fit",
            "unit": unit,
        }
    )
