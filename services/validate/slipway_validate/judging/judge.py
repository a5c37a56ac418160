"""Check each figure of an output against its limit, for two questions that are never mixed: is it faithful, and does it fit?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from slipway.validation.answers import AnswerComparison, LongContinuation
from slipway.validation.comparisons import Check, LogitComparison, ShapeCase
from slipway.validation.findings import OutputValidation
from slipway.validation.verdicts import Limits, Question
from slipway_validate.judging import parts, survival, texts
from slipway_validate.judging.distances import (
    CASE_TIMES,
    COST_TIMES,
    EXACT_DIFFERENCE,
    FLOOR,
    NOISE_TIMES,
    VALUES_FLOOR,
    Measure,
    absolute_limit,
    distance_of,
    times_allowed,
)
from slipway_validate.judging.fit import FitRule, fit_checks

EMBEDDING_CASE = "sentence_embedding"
Against = Literal["reference", "merged", "stored", "itself"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The limits and figures by which one output is judged.

    Attributes:
        limits: Absolute limits: of the stored weights, and those that were asked for.
        measure: How results are compared.
        effect: Distance of base and reference: the effect of the adapter on this text. None: there is no adapter, or it is unknown.
        yardstick: The model that it is compared with for faithfulness; None if there is none.
        noise: Distance that rounding the inputs of products makes, as its runtime does; 0 if it rounds none, None if that is unknown.
        cost: Distance from the yardstick that rounding the weights makes; 0 for the same weights, None if that is unknown.
        from_reference: Distance from the reference that rounding makes, to the merged model's type and to the output's; None if that is unknown.
        values: Number of values that are compared.
        measured: Number of values on which noise and cost were measured.
        exact: Whether weights and arithmetic are float32.
        logit_scale: The reference's scale of logits.
        arithmetic: The reference's arithmetic noise, in logits.
        place: Where the results lie if not on text alone, in words.
        elsewhere: Whether the text is built in, so that the fine-tune was not made for it.
    """

    limits: Limits
    measure: Measure
    effect: float | None = None
    yardstick: Against | None = None
    noise: float | None = 0.0
    cost: float | None = 0.0
    from_reference: float | None = None
    values: int = 1 << 30
    measured: int = 1 << 30
    exact: bool = False
    logit_scale: float = 1.0
    arithmetic: float | None = None
    place: str = ""
    elsewhere: bool = False

    @property
    def fit(self) -> FitRule:
        """Return the part that judges what is left of the fine-tune."""
        return FitRule(self.measure, self.effect, self.values, self.place, self.elsewhere)

    @property
    def own_noise(self) -> float | None:
        """Return the largest distance between two computations of the same weights; None if it is unknown."""
        floor = FLOOR if self.measure.logits else VALUES_FLOOR
        return None if self.noise is None else floor + times_allowed(NOISE_TIMES, self.measured) * self.noise

    @property
    def faithful_limit(self) -> float | None:
        """Return the largest distance from the yardstick; None if it is unknown."""
        if self.own_noise is None or self.cost is None:
            return None
        return self.own_noise + times_allowed(COST_TIMES, self.measured) * self.cost


class Judge:
    """Makes the checks of one output."""

    def __init__(self, rule: Rule, *, adapter: bool = True) -> None:
        self._rule = rule
        self._adapter = adapter

    def notes(self) -> tuple[str, ...]:
        """Return remarks on properties that could not be judged."""
        return () if self._adapter else ("there is no adapter: its presence and strength were not judged",)

    def checks(self, output: OutputValidation, *, non_finite: int) -> tuple[Check, ...]:
        """Return all checks that the output's figures allow."""
        checks = [_at_most("non_finite_logits", float(non_finite), 0.0, unit="count", against="itself")]
        checks += parts.checks(output.missing)
        checks += self.faithful_checks(output)
        if output.survival is not None:
            checks += survival.checks(output.survival, self._rule.limits)
        for case in output.cases:
            if not case.skipped:
                checks += self._check_case(case)
        if output.continuation and not output.continuation.skipped:
            checks += self._check_continuation(output.continuation)
        checks += texts.checks(output.texts)
        checks += fit_checks(output, self._rule.fit)
        if output.answers:
            checks += self._check_answers(output.answers)
        return (*checks, *self._check_requested(output))

    def faithful_checks(self, output: OutputValidation) -> list[Check]:
        """Return the checks of the results against the yardstick."""
        rule = self._rule
        sides = {"stored": output.to_stored, "merged": output.to_merged, "reference": output.to_reference}
        figures = sides.get(rule.yardstick or "")
        if figures is None or rule.yardstick is None or rule.faithful_limit is None:
            return []
        checks = [self._check_distance(distance_of(figures), rule.faithful_limit, against=rule.yardstick)]
        if rule.exact and rule.measure.logits:
            limit = absolute_limit(EXACT_DIFFERENCE, logit_scale=rule.logit_scale, noise=rule.arithmetic)
            checks.append(_at_most("max_abs_diff", figures.max_abs_diff, limit, unit="logits", against=rule.yardstick))
        return checks

    def _check_distance(
        self, value: float | None, limit: float, *, against: Against, prefix: str = "", question: Question = "faithful"
    ) -> Check:
        logits = self._rule.measure.logits
        name, unit, power = ("mean_kl", "nats/token", 1.0) if logits else ("relative_error", "share", 0.5)
        shown = None if value is None or not math.isfinite(value) else value**power
        return _at_most(f"{prefix}{name}", shown, limit**power, unit=unit, against=against, question=question)

    def _check_case(self, case: ShapeCase) -> list[Check]:
        """Check a case against the output itself, where no rounding of weights hides an error; in the native type, check what is kept."""
        rule, logits = self._rule, self._rule.measure.logits
        prefix = f"{case.name}."
        if case.name == "native_dtype":
            value = case.mean_kl if logits else _square(case.relative_error)
            return [self._check_distance(value, rule.fit.near, against="reference", prefix=prefix, question="fit")]
        if rule.own_noise is None:
            return []
        # It has no windows, so the vector of a text is compared with the reference's.
        if case.name == EMBEDDING_CASE:
            if rule.from_reference is None:
                return []
            limit = CASE_TIMES * (rule.own_noise + times_allowed(COST_TIMES, rule.measured) * rule.from_reference)
            return [self._check_distance(_square(case.relative_error), limit, against="reference", prefix=prefix)]
        value = case.self_mean_kl if logits else _square(case.self_relative_error)
        checks = [self._check_distance(value, CASE_TIMES * rule.own_noise, against="itself", prefix=prefix)]
        if rule.exact and logits:
            limit = absolute_limit(EXACT_DIFFERENCE, logit_scale=rule.logit_scale, noise=rule.arithmetic)
            checks.append(
                _at_most(f"{prefix}max_abs_diff", case.self_max_abs_diff, limit, unit="logits", against="itself")
            )
        return checks

    def _check_continuation(self, continuation: LongContinuation) -> list[Check]:
        """Check a long continuation; it has few tokens of one text, so its figure scatters like a case's."""
        unit, rule = "nats/token", self._rule
        checks = [_at_most("continuation.mean_kl", continuation.mean_kl, rule.fit.near, unit=unit, question="fit")]
        if rule.own_noise is not None:
            limit = CASE_TIMES * rule.own_noise
            checks.append(_at_most("continuation.cache_kl", continuation.cache_kl, limit, unit=unit, against="itself"))
        return checks

    def _check_answers(self, answers: AnswerComparison) -> list[Check]:
        """Check the first score of the answers. One answer may change where two are equally likely."""
        if not answers.scores or answers.scores[0].reference is None:
            return []
        score, allowed = answers.scores[0], self._rule.limits.quality_loss or 0.0
        limit = allowed + 1 / max(answers.with_expected, 1)
        return [_at_most(f"answers.{score.name}_loss", score.loss, limit, unit="share", question="fit")]

    def _check_requested(self, output: OutputValidation) -> list[Check]:
        """Check the absolute limits that ``validation.limits`` asks for."""
        limits, checks = self._rule.limits, []
        if output.to_reference is not None:
            checks += _check_absolute(output.to_reference, limits, scale=self._rule.logit_scale)
        if limits.perplexity_ratio is not None and output.reference_perplexity is not None:
            ratio = None if output.perplexity is None else output.perplexity / output.reference_perplexity
            checks.append(_at_most("perplexity_ratio", ratio, limits.perplexity_ratio, unit="ratio", question="fit"))
        if limits.adapter_strength_error is not None and output.adapter_strength is not None:
            error, limit = abs(output.adapter_strength - 1), limits.adapter_strength_error
            checks.append(_at_most("adapter_strength_error", error, limit, unit="share", question="fit"))
        if limits.case_mean_kl is not None and self._rule.measure.logits:
            checks += [
                _at_most(f"{case.name}.mean_kl", case.mean_kl, limits.case_mean_kl, unit="nats/token", question="fit")
                for case in output.cases
                if not case.skipped
            ]
        return checks


def _square(value: float | None) -> float | None:
    return None if value is None else value**2


def _check_absolute(figures: LogitComparison, limits: Limits, *, scale: float) -> list[Check]:
    checks = []
    if limits.mean_kl is not None and figures.relative_error is None:
        checks.append(_at_most("mean_kl", figures.mean_kl, limits.mean_kl, unit="nats/token", question="fit"))
    if limits.max_abs_diff is not None:
        limit = limits.max_abs_diff * scale
        checks.append(_at_most("max_abs_diff", figures.max_abs_diff, limit, unit="logits", question="fit"))
    if limits.top1_agreement is not None and figures.top1_agreement is not None:
        limit = limits.top1_agreement
        checks.append(_check("top1_agreement", figures.top1_agreement, limit, ">=", unit="share", question="fit"))
    if limits.relative_error is not None and figures.relative_error is not None:
        checks.append(
            _at_most("relative_error", figures.relative_error, limits.relative_error, unit="share", question="fit")
        )
    if limits.cosine_distance is not None and figures.cosine_distance is not None:
        limit = limits.cosine_distance
        checks.append(_at_most("cosine_distance", figures.cosine_distance, limit, unit="1 - cos", question="fit"))
    return checks


def _at_most(
    name: str,
    value: float | None,
    limit: float,
    *,
    unit: str,
    against: Against = "reference",
    question: Question = "faithful",
) -> Check:
    return _check(name, value, limit, "<=", unit=unit, against=against, question=question)


def _check(
    name: str,
    value: float | None,
    limit: float,
    comparison: Literal["<=", ">="],
    *,
    unit: str,
    against: Against = "reference",
    question: Question,
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
        question=question,
        unit=unit,
    )
