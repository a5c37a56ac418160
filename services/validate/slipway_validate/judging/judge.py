"""Checks: each figure of an output against its limit."""

from __future__ import annotations

import math
from typing import Literal

from slipway.validation.findings import Check, Limits, LogitComparison, OutputValidation, ShapeCase
from slipway_validate.judging.limits import MERGED_FLOAT32_MAX_ABS_DIFF, NATIVE_MEAN_KL, absolute_limit

Against = Literal["reference", "merged", "itself"]


class Judge:
    """Makes the checks of one output.

    Args:
        limits: Limits against the reference.
        merged_limits: Limits against the merged model, which differ where the merged weights are rounded themselves.
        logit_scale: The reference's.
        noise: The reference's arithmetic noise, logits.
        effect: Mean KL(reference ‖ base): how much the adapter matters on this text, nats per token.
    """

    def __init__(
        self,
        limits: Limits,
        merged_limits: Limits,
        *,
        logit_scale: float,
        noise: float | None,
        effect: float | None = None,
    ) -> None:
        self._limits = limits
        self._merged_limits = merged_limits
        self._scale = logit_scale
        self._noise = noise
        # Where rounding may move the model further than the adapter does, the adapter's strength drowns in it.
        self._sees_adapter = effect is not None and effect >= limits.mean_kl

    def notes(self) -> tuple[str, ...]:
        """Remarks on what could not be judged."""
        if self._sees_adapter:
            return ()
        return ("the adapter hardly matters on this text, so its strength was not judged: give text of its own kind",)

    def checks(self, output: OutputValidation, *, non_finite: int) -> tuple[Check, ...]:
        """Every check that the output's figures allow."""
        found = [_at_most("non_finite_logits", float(non_finite), 0.0, unit="count", against="itself")]
        is_merged = output.name == "pytorch"
        if output.to_reference:
            found += self._distance(output.to_reference, self._limits, against="reference", is_merged=is_merged)
        if output.to_merged:
            found += self._distance(output.to_merged, self._merged_limits, against="merged", is_merged=False)
        if output.reference_perplexity is not None:
            ratio = None if output.perplexity is None else output.perplexity / output.reference_perplexity
            found.append(_at_most("perplexity_ratio", ratio, self._limits.perplexity_ratio, unit="ratio"))
        if output.to_base and self._sees_adapter:
            strength = output.adapter_strength
            error = None if strength is None else abs(strength - 1)
            limit = self._limits.adapter_strength_error
            found.append(_at_most("adapter_strength_error", error, limit, unit="share"))
        native = output.engine.native_dtype if output.engine else ""
        for case in output.cases:
            if not case.skipped:
                found += self._case(case, native_dtype=native)
        return tuple(found)

    def _distance(self, figures: LogitComparison, limits: Limits, *, against: Against, is_merged: bool) -> list[Check]:
        found = [
            _at_most("mean_kl", figures.mean_kl, limits.mean_kl, unit="nats/token", against=against),
            _check(
                "top1_agreement", figures.top1_agreement, limits.top1_agreement, ">=", unit="share", against=against
            ),
        ]
        largest = self._absolute(limits, is_merged=is_merged)
        if largest is not None:
            found.insert(0, _at_most("max_abs_diff", figures.max_abs_diff, largest, unit="logits", against=against))
        return found

    def _case(self, case: ShapeCase, *, native_dtype: str) -> list[Check]:
        """Against the reference; and against itself, where no rounding of weights hides a mistake."""
        name = f"{case.name}.mean_kl"
        kl = self._limits.case_mean_kl
        if case.name == "native_dtype":
            kl += NATIVE_MEAN_KL.get(native_dtype, max(NATIVE_MEAN_KL.values()))
            return [_at_most(name, case.mean_kl, kl, unit="nats/token")]
        found = [
            _at_most(name, case.mean_kl, kl, unit="nats/token"),
            _at_most(name, case.self_mean_kl, self._merged_limits.mean_kl, unit="nats/token", against="itself"),
        ]
        largest = self._absolute(self._merged_limits, is_merged=False)
        if largest is not None:
            value = case.self_max_abs_diff
            found.append(_at_most(f"{case.name}.max_abs_diff", value, largest, unit="logits", against="itself"))
        return found

    def _absolute(self, limits: Limits, *, is_merged: bool) -> float | None:
        if is_merged and limits.max_abs_diff is not None:
            tighter = min(limits.max_abs_diff, MERGED_FLOAT32_MAX_ABS_DIFF)
            limits = limits.model_copy(update={"max_abs_diff": tighter})
        return absolute_limit(limits, logit_scale=self._scale, noise=self._noise)


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
