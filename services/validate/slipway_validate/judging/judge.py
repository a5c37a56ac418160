"""Check each figure of an output against its limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from slipway.validation.answers import AnswerComparison, LongContinuation
from slipway.validation.comparisons import Check, LogitComparison, ShapeCase
from slipway.validation.findings import OutputValidation
from slipway.validation.limit_overrides import Limits
from slipway_validate.judging import survival, texts
from slipway_validate.judging.limits import (
    ALONG_EFFECT,
    CASE_FACTOR,
    LIKELY,
    MERGED_FLOAT32_MAX_ABS_DIFF,
    NATIVE_MEAN_KL,
    NATIVE_RELATIVE_ERROR,
    absolute_limit,
)
from slipway_validate.judging.measures import Measure

Against = Literal["reference", "merged", "itself"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The limits and figures by which one output is judged.

    Attributes:
        limits: Limits against the reference.
        merged_limits: Limits against the merged model, which differ if the merged weights are rounded themselves.
        measure: How results are compared.
        logit_scale: The reference's scale of logits.
        noise: The reference's arithmetic noise, in logits.
        effect: Distance of base and reference: the effect of the adapter on this text. None: there is no adapter, or it is unknown.
        values: Number of values that are compared.
    """

    limits: Limits
    merged_limits: Limits
    measure: Measure
    logit_scale: float = 1.0
    noise: float | None = None
    effect: float | None = None
    values: int = 1 << 30


class Judge:
    """Makes the checks of one output."""

    def __init__(self, rule: Rule, *, adapter: bool = True) -> None:
        self._rule = rule
        self._adapter = adapter
        # If rounding may move the model further than the adapter does, the adapter's strength cannot be measured.
        drowning = rule.measure.limit(rule.limits)
        self._sees_adapter = rule.effect is not None and rule.effect >= drowning
        self._strength_limit = rule.limits.adapter_strength_error
        if rule.effect and not rule.measure.many:
            # With few values, noise is not orthogonal to the effect: it moves the strength by a part of its own size.
            along = min(1.0, max(ALONG_EFFECT, LIKELY / math.sqrt(max(1, rule.values))))
            self._strength_limit = max(self._strength_limit, along * math.sqrt(drowning / rule.effect))

    def notes(self) -> tuple[str, ...]:
        """Return remarks on properties that could not be judged."""
        if not self._adapter:
            return ("there is no adapter: its presence and strength were not judged",)
        if self._sees_adapter:
            return ()
        return (
            "the adapter has almost no effect on this text, so its strength was not judged: give text like its training data",
        )

    def checks(self, output: OutputValidation, *, non_finite: int) -> tuple[Check, ...]:
        """Return all checks that the output's figures allow."""
        found = [_at_most("non_finite_logits", float(non_finite), 0.0, unit="count", against="itself")]
        is_merged = output.name == "pytorch"
        if output.to_reference:
            found += self._distance(output.to_reference, self._rule.limits, against="reference", is_merged=is_merged)
        if output.to_merged:
            found += self._distance(output.to_merged, self._rule.merged_limits, against="merged", is_merged=False)
        if output.reference_perplexity is not None:
            ratio = None if output.perplexity is None else output.perplexity / output.reference_perplexity
            found.append(_at_most("perplexity_ratio", ratio, self._rule.limits.perplexity_ratio, unit="ratio"))
        if output.to_base and self._sees_adapter:
            strength = output.adapter_strength
            error = None if strength is None else abs(strength - 1)
            found.append(_at_most("adapter_strength_error", error, self._strength_limit, unit="share"))
        if output.survival is not None:
            found += survival.checks(output.survival, self._rule.limits)
        if output.continuation and not output.continuation.skipped:
            found += self._continuation(output.continuation)
        if output.answers:
            found += self._answers(output.answers)
        found += texts.checks(output.texts)
        native = output.engine.native_dtype if output.engine else ""
        for case in output.cases:
            if not case.skipped:
                found += self._case(case, native_dtype=native)
        return tuple(found)

    def _distance(self, figures: LogitComparison, limits: Limits, *, against: Against, is_merged: bool) -> list[Check]:
        found = (
            self._logits(figures, limits, against) if self._rule.measure.logits else _values(figures, limits, against)
        )
        largest = self._absolute(limits, is_merged=is_merged)
        if largest is not None:
            unit = "logits" if self._rule.measure.logits else ""
            found.insert(0, _at_most("max_abs_diff", figures.max_abs_diff, largest, unit=unit, against=against))
        return found

    def _logits(self, figures: LogitComparison, limits: Limits, against: Against) -> list[Check]:
        agreement = "top1_agreement" if self._rule.measure.many else "choice_agreement"
        value = getattr(figures, agreement)
        return [
            _at_most("mean_kl", figures.mean_kl, limits.mean_kl, unit="nats/token", against=against),
            _check(agreement, value, limits.top1_agreement, ">=", unit="share", against=against),
        ]

    def _continuation(self, found: LongContinuation) -> list[Check]:
        """Check a long continuation: few tokens of one text, so the figure scatters as that of a case."""
        limits, own = self._rule.limits, self._rule.merged_limits
        unit = "nats/token"
        return [
            _at_most("continuation.mean_kl", found.mean_kl, limits.case_mean_kl, unit=unit),
            _at_most("continuation.cache_kl", found.cache_kl, own.case_mean_kl, unit=unit, against="itself"),
        ]

    def _answers(self, found: AnswerComparison) -> list[Check]:
        """Check the first score of the answers. One answer may change where two are equally likely."""
        if not found.scores or found.scores[0].reference is None:
            return []
        score, allowed = found.scores[0], self._rule.limits.quality_loss or 0.0
        limit = allowed + 1 / max(found.with_expected, 1)
        return [_at_most(f"answers.{score.name}_loss", score.loss, limit, unit="share")]

    def _case(self, case: ShapeCase, *, native_dtype: str) -> list[Check]:
        """Check a case against the reference, and against the output itself, where no rounding of weights hides an error."""
        limits, own_limits, logits = self._rule.limits, self._rule.merged_limits, self._rule.measure.logits
        if logits:
            figure, unit, native = "mean_kl", "nats/token", NATIVE_MEAN_KL
            limit, own_limit = limits.case_mean_kl, own_limits.mean_kl
        else:
            figure, unit, native = "relative_error", "share", NATIVE_RELATIVE_ERROR
            limit, own_limit = CASE_FACTOR * (limits.relative_error or 0.0), own_limits.relative_error or 0.0
        name, value = f"{case.name}.{figure}", getattr(case, figure)
        if case.name == "native_dtype":
            return [_at_most(name, value, limit + native.get(native_dtype, max(native.values())), unit=unit)]
        found = [
            _at_most(name, value, limit, unit=unit),
            _at_most(name, getattr(case, f"self_{figure}"), own_limit, unit=unit, against="itself"),
        ]
        largest = self._absolute(own_limits, is_merged=False) if logits else None
        if largest is not None:
            value = case.self_max_abs_diff
            found.append(_at_most(f"{case.name}.max_abs_diff", value, largest, unit="logits", against="itself"))
        return found

    def _absolute(self, limits: Limits, *, is_merged: bool) -> float | None:
        if is_merged and limits.max_abs_diff is not None:
            tighter = min(limits.max_abs_diff, MERGED_FLOAT32_MAX_ABS_DIFF)
            limits = limits.model_copy(update={"max_abs_diff": tighter})
        return absolute_limit(limits, logit_scale=self._rule.logit_scale, noise=self._rule.noise)


def _values(figures: LogitComparison, limits: Limits, against: Against) -> list[Check]:
    """Check values that are not logits; a single score has no direction and therefore no cosine distance."""
    error, distance = figures.relative_error, figures.cosine_distance
    found = [_at_most("relative_error", error, limits.relative_error or 0.0, unit="share", against=against)]
    if distance is not None and limits.cosine_distance is not None:
        found.append(_at_most("cosine_distance", distance, limits.cosine_distance, unit="1 - cos", against=against))
    return found


def _at_most(name: str, value: float | None, limit: float, *, unit: str, against: Against = "reference") -> Check:
    return _check(name, value, limit, "<=", unit=unit, against=against)


def _check(
    name: str, value: float | None, limit: float, comparison: Literal["<=", ">="], *, unit: str, against: Against
) -> Check:
    finite = value is not None and math.isfinite(value)
    kept = finite and value is not None and (value <= limit if comparison == "<=" else value >= limit)
    return Check(
        name=name,
        value=value if finite else None,
        limit=limit,
        comparison=comparison,
        passed=kept,
        against=against,
        unit=unit,
    )
