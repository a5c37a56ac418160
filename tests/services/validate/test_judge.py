"""Limits and what they lead to: which row applies, which checks fail, what is said about it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from pydantic import ValidationError as PydanticError

from slipway.models.families import Comparison
from slipway.validation.comparisons import LogitComparison, ShapeCase
from slipway.validation.findings import OutputStatus, OutputValidation
from slipway_validate.judging import explain
from slipway_validate.judging.judge import Judge, Rule
from slipway_validate.judging.limits import LIMITS, LimitOverrides, absolute_limit, coarser, level_of, limits_by_level
from slipway_validate.judging.measures import choose_measure

NEXT_TOKEN = choose_measure(Comparison.NEXT_TOKEN, width=100)


def comparison(kl: float | None = 0.0, *, largest: float | None = 0.0, top1: float = 1.0) -> LogitComparison:
    return LogitComparison(
        tokens=100, max_abs_diff=largest, mean_abs_diff=0, mean_kl=kl, max_kl=kl, top1_agreement=top1
    )


def judged(level: str, name: str = "onnx", **figures: object) -> OutputValidation:
    output = OutputValidation(name=name, format=name.partition("-")[0], level="none", status=OutputStatus.PASSED)
    output = output.model_copy(update=figures)
    judge = Judge(Rule(LIMITS[level], LIMITS[level], NEXT_TOKEN, noise=1e-6))
    return output.model_copy(update={"checks": judge.checks(output, non_finite=0)})


def names(output: OutputValidation) -> set[str]:
    return {check.name for check in output.failed_checks}


def test_the_table_gets_looser_from_row_to_row() -> None:
    rows = list(LIMITS.values())
    for tighter, looser in pairwise(rows):
        assert tighter.mean_kl < looser.mean_kl
        assert tighter.perplexity_ratio < looser.perplexity_ratio
        assert tighter.case_mean_kl < looser.case_mean_kl


def test_limits_that_were_promised() -> None:
    assert (LIMITS["int8"].mean_kl, LIMITS["int8"].top1_agreement) == (1e-3, 0.98)
    assert (LIMITS["int4"].mean_kl, LIMITS["int4"].top1_agreement) == (2e-2, 0.90)
    assert LIMITS["float32"].max_abs_diff == 1e-4


@pytest.mark.parametrize(("level", "kl"), [("int4", 1.9e-2), ("int8", 0.9e-3), ("bfloat16", 1e-4), ("float16", 1e-5)])
def test_each_level_passes_below_its_limit_and_fails_above(level: str, kl: float) -> None:
    assert not names(judged(level, to_reference=comparison(kl, largest=5.0)))
    assert names(judged(level, to_reference=comparison(kl * 10, largest=5.0))) == {"mean_kl"}


def test_float32_limits_single_logits_and_the_merged_model_tighter() -> None:
    almost = comparison(0.0, largest=5e-5)
    assert not names(judged("float32", to_reference=almost))
    assert names(judged("float32", name="pytorch", to_reference=almost)) == {"max_abs_diff"}


def test_figures_that_are_not_finite_fail() -> None:
    assert names(judged("int4", to_reference=comparison(None, largest=None))) == {"mean_kl"}
    assert names(judged("int4", perplexity=None, reference_perplexity=10.0)) == {"perplexity_ratio"}
    judge = Judge(Rule(LIMITS["int4"], LIMITS["int4"], NEXT_TOKEN))
    output = OutputValidation(name="onnx", format="onnx", status=OutputStatus.PASSED)
    assert [check.passed for check in judge.checks(output, non_finite=1)] == [False]


def test_noise_of_deep_models_widens_float32_limits_up_to_a_bound() -> None:
    exact = LIMITS["float32"]
    assert absolute_limit(exact, logit_scale=2.0, noise=1e-6) == pytest.approx(2e-4)
    assert absolute_limit(exact, logit_scale=2.0, noise=1e-4) == pytest.approx(8e-4)
    assert absolute_limit(exact, logit_scale=2.0, noise=1.0) == pytest.approx(2e-3)
    assert absolute_limit(LIMITS["int8"], logit_scale=2.0, noise=1e-6) is None


def test_skipped_cases_are_not_judged() -> None:
    skipped = ShapeCase(name="decode", skipped="no cache")
    wrong = ShapeCase(name="chunked", mean_kl=1.0, self_mean_kl=1.0, self_max_abs_diff=3.0)
    found = judged("int4", cases=(skipped, wrong))
    assert names(found) == {"chunked.mean_kl"}
    assert {check.against for check in found.failed_checks} == {"reference", "itself"}


def test_adapter_strength_is_judged_only_where_it_can_be_seen() -> None:
    weak = OutputValidation(name="onnx", format="onnx", status=OutputStatus.PASSED)
    weak = weak.model_copy(update={"to_base": comparison(0.3), "adapter_strength": 0.9})
    seen = Judge(Rule(LIMITS["int4"], LIMITS["int4"], NEXT_TOKEN, effect=0.3))
    drowned = Judge(Rule(LIMITS["int4"], LIMITS["int4"], NEXT_TOKEN, effect=0.01))
    failed = [check.name for check in seen.checks(weak, non_finite=0) if not check.passed]
    assert failed == ["adapter_strength_error"]
    assert all(check.passed for check in drowned.checks(weak, non_finite=0))
    assert drowned.notes()
    assert not seen.notes()


def test_the_fewer_values_are_compared_the_more_noise_may_lie_along_the_effect() -> None:
    found = OutputValidation(name="onnx-int8", format="onnx", status=OutputStatus.PASSED)
    found = found.model_copy(update={"to_base": comparison(0.3), "adapter_strength": 1.06})
    scores = choose_measure(Comparison.CLASSES, width=1)
    for values, passes in ((6, True), (600, False)):
        judge = Judge(Rule(LIMITS["int8"], LIMITS["int8"], scores, effect=0.3, values=values))
        assert all(check.passed for check in judge.checks(found, non_finite=0)) is passes


def test_levels() -> None:
    assert level_of("bfloat16") == "bfloat16"
    assert level_of("float8_e4m3") == "float32"
    assert coarser("float32", "bfloat16") == coarser("bfloat16", "float32") == "bfloat16"
    assert limits_by_level({"int4": LimitOverrides(mean_kl=0.5)})["int4"].mean_kl == 0.5
    assert limits_by_level({"int4": LimitOverrides(mean_kl=0.5)})["int4"].top1_agreement == 0.90
    with pytest.raises(PydanticError):
        LimitOverrides(mean_kl=-1.0)


def test_explanations_name_the_cause() -> None:
    merged = judged("float32", name="pytorch", to_reference=comparison(0.5, largest=3.0))
    inherited = judged(
        "float32", to_reference=comparison(0.5, largest=3.0), to_merged=comparison(0.0), to_base=comparison(0.9)
    )
    assert "the merge is wrong" in explain.explain_checks(inherited, merged=merged)[1]
    int4 = judged("int4", name="onnx-int4", to_reference=comparison(0.5)).model_copy(update={"level": "int4"})
    said, remedy = explain.explain_checks(int4, merged=None)
    assert "mean_kl (against reference) is 0.5, limit <= 0.02" in said
    assert "int8" in remedy
    assert explain.explain_checks(judged("int4", to_reference=comparison(0.0)), merged=None) == ("", "")
