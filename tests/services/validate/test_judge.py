"""Limits and what they lead to: what is measured sets them, which checks fail, and what is said about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError as PydanticError

from slipway.model.families import DECODER, Comparison
from slipway.proof.runtime import Samples
from slipway.validation.comparisons import LogitComparison, ShapeCase
from slipway.validation.findings import OutputStatus, OutputValidation
from slipway.validation.survival import AdapterSurvival, ModuleSurvival
from slipway.validation.verdicts import NEAR, WEAK_ELSEWHERE, Answer, kept_share
from slipway_validate.judging import explain, survival
from slipway_validate.judging.distances import (
    FLOOR,
    LIMITS,
    LimitOverrides,
    absolute_limit,
    choose_measure,
    coarser,
    level_of,
    limits_by_level,
    times_allowed,
)
from slipway_validate.judging.fit import fit_verdict, name_alternatives
from slipway_validate.judging.judge import Judge, Rule
from slipway_validate.judging.yardsticks import ReferenceRun
from slipway_validate.protocol.messages import RunResult

NEXT_TOKEN = choose_measure(Comparison.NEXT_TOKEN, width=100)
EFFECT = 1.66
"""Divergence of SmolLM2-135M's base from a fine-tune of it, nats per token."""


def comparison(kl: float | None = 0.0, *, largest: float | None = 0.0, top1: float = 1.0) -> LogitComparison:
    return LogitComparison(
        tokens=100, max_abs_diff=largest, mean_abs_diff=0, mean_kl=kl, max_kl=kl, top1_agreement=top1
    )


def rule(level: str = "bfloat16", **figures: object) -> Rule:
    return Rule(**{"limits": LIMITS[level], "measure": NEXT_TOKEN, "effect": EFFECT, **figures})  # type: ignore[arg-type]


def test_a_distance_that_was_measured_on_few_values_may_be_exceeded_more() -> None:
    """A classifier has some values per text; what thousands of tokens measured is known."""
    assert times_allowed(4.0, 100 * 49152) == times_allowed(4.0, 64) == 4.0
    assert 10 < times_allowed(4.0, 12) < 15
    few, many = (rule(yardstick="reference", noise=0.0, cost=1e-3, measured=values) for values in (12, 1 << 20))
    assert (few.faithful_limit or 0.0) > 2 * (many.faithful_limit or 0.0)


def judged(by: Rule, name: str = "onnx", **figures: object) -> OutputValidation:
    name_of_format, _, level = name.partition("-")
    output = OutputValidation(name=name, format=name_of_format, level=level or "none", status=OutputStatus.PASSED)
    output = output.model_copy(update=figures)
    if output.to_reference is not None:
        output = output.model_copy(update={"kept": kept_share(output.to_reference.mean_kl, by.effect)})
    output = output.model_copy(update={"checks": Judge(by).checks(output, non_finite=0)})
    status = OutputStatus.FAILED if output.failed_checks else OutputStatus.PASSED
    found = output.model_copy(update={"fit": fit_verdict(output, by.fit), "status": status})
    said, remedy = explain.explain_checks(found, base_limit=by.faithful_limit)
    return found.model_copy(update={"explanation": said, "remedy": remedy})


def names(output: OutputValidation) -> set[str]:
    return {check.name for check in output.failed_checks}


def test_what_rounding_costs_on_text_that_the_fine_tune_was_not_made_for_is_no_loss_of_it() -> None:
    """As measured: q4_k_m of SmolLM2-135M, and a fine-tune that moves the built-in text by 0.104 nats and its own by 1.66."""
    figures = {"to_reference": comparison(0.147), "adapter_strength": 0.95}
    elsewhere = judged(rule(effect=0.104, elsewhere=True), "gguf-q4_k_m", **figures)
    assert (elsewhere.status, elsewhere.fit.answer) == (OutputStatus.PASSED, Answer.WARNING)
    assert "which it was not trained for" in elsewhere.fit.said
    assert "kept" not in {check.name for check in elsewhere.checks}
    own = judged(rule(effect=0.104), "gguf-q4_k_m", **figures)
    assert (own.status, own.fit.answer) == (OutputStatus.FAILED, Answer.FAILED)


def test_an_output_without_the_fine_tune_fails_on_any_text() -> None:
    lost = judged(rule(effect=0.3, elsewhere=True), to_reference=comparison(0.3), adapter_strength=0.02)
    assert (lost.fit.answer, names(lost)) == (Answer.FAILED, {"adapter_strength_error"})


@pytest.mark.parametrize("distance", [0.34, 0.36])
def test_both_ways_to_judge_meet_where_one_gives_way_to_the_other(distance: float) -> None:
    answers = {
        judged(rule(effect=effect, elsewhere=True), to_reference=comparison(distance), adapter_strength=1.0).fit.answer
        for effect in (WEAK_ELSEWHERE - 1e-9, WEAK_ELSEWHERE + 1e-9)
    }
    assert answers == {Answer.WARNING if distance < NEAR else Answer.FAILED}


@pytest.mark.parametrize(
    ("divergence", "answer"),
    [
        (2.4e-4, Answer.PASSED),
        (0.2, Answer.PASSED),
        (0.3, Answer.WARNING),
        (0.8, Answer.WARNING),
        (0.89, Answer.FAILED),
    ],
)
def test_the_share_of_the_fine_tune_that_is_left_decides(divergence: float, answer: Answer) -> None:
    assert judged(rule(), to_reference=comparison(divergence)).fit.answer is answer


def test_no_share_is_below_zero_or_known_without_an_adapter() -> None:
    assert kept_share(2.0, 1.0) == 0.0
    assert kept_share(0.5, None) is None
    assert kept_share(None, 1.0) is None
    assert kept_share(0.25, 1.0) == 0.75


def test_a_weak_adapter_is_judged_by_its_direction_and_the_distance() -> None:
    weak = rule(effect=0.01)
    right = judged(weak, to_reference=comparison(0.02), adapter_strength=1.02)
    assert right.fit.answer is Answer.PASSED
    assert "its direction and the distance decide" in right.fit.said
    assert judged(weak, to_reference=comparison(0.02), adapter_strength=0.8).fit.answer is Answer.WARNING
    assert names(judged(weak, to_reference=comparison(0.02), adapter_strength=0.1)) == {"adapter_strength_error"}
    assert names(judged(weak, to_reference=comparison(0.5), adapter_strength=1.0)) == {"mean_kl"}


def test_without_an_adapter_the_distance_decides() -> None:
    plain = rule(effect=None)
    assert [judged(plain, to_reference=comparison(far)).fit.answer for far in (0.05, 0.2, 0.5)] == [
        Answer.PASSED,
        Answer.WARNING,
        Answer.FAILED,
    ]


def test_a_merge_is_compared_with_the_best_one_that_its_type_holds() -> None:
    best = rule(yardstick="reference", cost=2.4e-4)
    assert not names(judged(best, "pytorch", to_reference=comparison(3.7e-4)))
    broken = judged(best, "pytorch", to_reference=comparison(2e-3))
    assert names(broken) == {"mean_kl"}
    assert broken.explanation.startswith("broken: it is further from the model than rounding its weights")
    assert "scale" not in broken.explanation


def test_noise_that_the_runtime_makes_is_allowed_and_no_more() -> None:
    exact, rounding = rule(yardstick="stored"), rule(yardstick="stored", noise=7e-3)
    far = {"to_reference": comparison(1e-2), "to_stored": comparison(1e-2)}
    assert names(judged(exact, **far)) == {"mean_kl"}
    assert not names(judged(rounding, **far))
    broken = judged(rounding, to_reference=comparison(0.1), to_stored=comparison(0.1))
    assert "it computes something else than its own weights" in broken.explanation
    assert rule(noise=0.0).faithful_limit == FLOOR


def test_what_was_not_measured_gets_no_verdict() -> None:
    unknown = rule(yardstick="merged", noise=None)
    found = judged(unknown, to_merged=comparison(5.0), cases=(ShapeCase(name="decode", self_mean_kl=3.0),))
    assert not found.failed_checks
    assert unknown.faithful_limit is None
    said = explain.faithful_verdict(found, yardstick="", unjudged="its weights are not read", base_limit=None, where="")
    assert (said.answer, said.said) == (Answer.NOT_JUDGED, "its weights are not read")


def test_float32_limits_single_logits() -> None:
    exact = rule("float32", yardstick="stored", exact=True)
    assert not names(judged(exact, to_stored=comparison(0.0, largest=5e-5)))
    assert names(judged(exact, to_stored=comparison(0.0, largest=5e-3))) == {"max_abs_diff"}


def test_figures_that_are_not_finite_fail() -> None:
    assert names(judged(rule(yardstick="stored"), to_stored=comparison(None, largest=None))) == {"mean_kl"}
    assert names(judged(rule(), to_reference=comparison(None))) == {"kept"}
    output = OutputValidation(name="onnx", format="onnx", status=OutputStatus.PASSED)
    assert [check.passed for check in Judge(rule()).checks(output, non_finite=1)] == [False]


def test_noise_of_deep_models_widens_the_limit_of_single_logits() -> None:
    assert absolute_limit(1e-4, logit_scale=2.0, noise=1e-6) == pytest.approx(2e-4)
    assert absolute_limit(1e-4, logit_scale=2.0, noise=1e-4) == pytest.approx(3.2e-3)
    assert absolute_limit(1e-4, logit_scale=1.0, noise=2.2e-4) > 3e-3, "as far as a right merge of Gemma 3n is away"


def test_skipped_cases_are_not_judged_and_others_only_beside_the_output_itself() -> None:
    skipped = ShapeCase(name="decode", skipped="no cache")
    wrong = ShapeCase(name="chunked", mean_kl=0.1, self_mean_kl=1.0, self_max_abs_diff=3.0)
    found = judged(rule(), cases=(skipped, wrong))
    assert names(found) == {"chunked.mean_kl"}
    assert {check.against for check in found.failed_checks} == {"itself"}
    assert "its causal mask ignores the cached tokens" in found.explanation


def test_absolute_limits_are_judged_as_they_are_given() -> None:
    asked = rule().limits.model_copy(update={"mean_kl": 1e-4, "top1_agreement": 0.99, "perplexity_ratio": 1.01})
    found = judged(
        rule(limits=asked), to_reference=comparison(2e-4, top1=0.98), perplexity=11.0, reference_perplexity=10.0
    )
    assert names(found) == {"mean_kl", "top1_agreement", "perplexity_ratio"}


def test_levels() -> None:
    assert level_of("bfloat16") == "bfloat16"
    assert level_of("float8_e4m3") == "float32"
    assert coarser("float32", "bfloat16") == coarser("bfloat16", "float32") == "bfloat16"
    assert limits_by_level({"int4": LimitOverrides(mean_kl=0.5)})["int4"].mean_kl == 0.5
    assert limits_by_level({"int4": LimitOverrides(mean_kl=0.5)})["int4"].top1_agreement is None
    with pytest.raises(PydanticError):
        LimitOverrides(mean_kl=-1.0)


def test_too_coarse_is_said_with_what_keeps_more() -> None:
    coarse = judged(rule(), "pytorch-int4", to_reference=comparison(0.89), size_bytes=132, level_cost=0.89)
    assert coarse.explanation.startswith("too coarse: int4 keeps 46 % of what the fine-tune changed")
    assert "calibrate it" in coarse.remedy
    others = [
        judged(rule(), "gguf-q4_k_m", to_reference=comparison(0.126), size_bytes=105),
        judged(rule(), "onnx-int8", to_reference=comparison(9.8e-3), size_bytes=158),
    ]
    found = name_alternatives([coarse, *others])
    assert "of this export, gguf-q4_k_m 92 %, onnx-int8 99 %" in found[0].fit.said
    assert "gguf-q4_k_m 92 %" in found[0].explanation
    assert found[1:] == others


def test_a_share_below_what_passes_is_not_shown_as_what_passes() -> None:
    found = judged(rule(), "gguf-q4_k_m", to_reference=comparison(0.2556))
    assert found.fit.answer is Answer.WARNING
    assert "it keeps 84 % of" in found.fit.said


def test_the_merge_is_blamed_only_where_stored_weights_show_it() -> None:
    module = ModuleSurvival(module="model.layers.1.mlp.up_proj", layer=1, strength=1.5, noise=1e-3)
    shown = survival.add_faults(AdapterSurvival(modules=(module,)), LIMITS["bfloat16"])
    blamed = judged(rule(yardstick="reference", cost=1e-4), "pytorch", survival=shown, to_reference=comparison(0.9))
    assert "model.layers.1.mlp.up_proj holds 1.50 of its update instead of 1" in blamed.explanation
    assert blamed.remedy.startswith("merge again")
    unseen = judged(rule(yardstick="stored"), to_reference=comparison(0.9), to_stored=comparison(0.9))
    assert "merge" not in unseen.remedy


def test_the_base_model_is_named() -> None:
    found = judged(rule(yardstick="reference"), "pytorch", to_reference=comparison(EFFECT), to_base=comparison(0.0))
    assert "it behaves like the base model: the adapter is missing from it" in found.explanation
    assert judged(rule(), to_reference=comparison(0.0)).explanation == ""


def test_a_single_logit_is_judged_only_where_the_noise_of_arithmetic_may_be_known() -> None:
    run = ReferenceRun(
        folder=Path(),
        result=RunResult(),
        family=DECODER,
        samples=Samples(np.zeros((1, 2), np.int64)),
        with_adapter=False,
        merged_level="float32",
    )
    assert run.knows_noise, "no shape was tried, and none was unsteady"
    unsteady = replace(run, unsteady_cases={"decode_left_padded": "the reference itself gives other results"})
    assert not unsteady.knows_noise
    assert replace(unsteady, noise=1e-5).knows_noise
