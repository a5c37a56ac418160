"""What validation tells of the base model, by the adapter's gain in each window of text."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest
from rich.console import Console
from rich.style import Style

from slipway.base_match import BaseMatch, BaseMatchStatus, joined
from slipway.base_match.match import REASON_LABEL, STATUS_LABEL, measure
from slipway.cli.export.summary import summary
from slipway.results.result import ExportResult, FormatResult
from slipway.validation.findings import AdapterEvidence, Reference, ValidationInputs, ValidationReport
from slipway.validation.speed import Engine

RIGHT = (0.9, 0.7, 1.1, 0.6, 0.8, 0.5, 0.9, 1.2, 0.4, 0.9)
"""As the sample's adapter gains on its base."""
NOISE = (0.06, -0.03, 0.02, 0.09, -0.05, 0.04, 0.01, -0.02, 0.05, -0.06)
"""As it gains on a model of equal shapes with other weights."""
UNPROVEN = BaseMatch(status=BaseMatchStatus.UNPROVEN, reason="the adapter does not name its base model")


def report(gains: tuple[float | None, ...], *, held_out: bool = True, base: float = 165.0) -> ValidationReport:
    return ValidationReport(
        reference=Reference(
            description="base + adapter",
            engine=Engine(runtime="transformers"),
            perplexity=71.0,
            base_perplexity=base,
            gain_per_window=gains,
        ),
        inputs=ValidationInputs(
            samples=len(gains),
            sequence_length=128,
            tokens=128 * len(gains),
            requested_samples=10,
            vocabulary=1024,
            seed=0,
            prompts=0,
            new_tokens=0,
            text_source="text",
            held_out=held_out,
        ),
        outputs=(),
    )


def test_a_clear_gain_speaks_for_the_base() -> None:
    found = joined(UNPROVEN, report(RIGHT))
    assert (found.status, found.verdict) == (BaseMatchStatus.MEASURED, "green")
    assert found.reason == "the adapter lowers perplexity from 165 to 71 on held-out text (in 10 of 10 windows)"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "validation.heldout"),
        (report(()), "compare_outputs"),
        (report((0.9, 0.8)), "not enough evidence"),
        (report((0.9, 0.8, None, 0.7)), "not enough evidence"),
        (report(NOISE), "does not clearly lower"),
        (report(tuple(-gain for gain in RIGHT)), "does not clearly lower"),
        (report((0.011, 0.012, 0.011, 0.012)), "does not clearly lower"),
        (report((2.0, 0.01, 0.02, -0.01)), "does not clearly lower"),
        (report(RIGHT, base=1100.0), "no better than guessing"),
        (report((0.05, 0.06, 0.05, 0.06), held_out=False), "validation.heldout"),
    ],
)
def test_anything_less_leaves_it_unproven(found: ValidationReport | None, says: str) -> None:
    verdict = joined(UNPROVEN, found)
    assert (verdict.status, verdict.verdict) == (BaseMatchStatus.UNPROVEN, "amber")
    assert says in verdict.reason
    assert UNPROVEN.reason in verdict.reason


def test_the_built_in_text_needs_a_larger_gain() -> None:
    gains = (0.05, 0.06, 0.05, 0.06)
    assert measure(report(gains)).helps
    assert not measure(report(gains, held_out=False)).helps
    assert measure(report(RIGHT, held_out=False)).helps


@pytest.mark.parametrize("status", [BaseMatchStatus.CONFIRMED, BaseMatchStatus.TRUSTED])
def test_files_that_tell_are_not_overruled(status: BaseMatchStatus) -> None:
    files = BaseMatch(status=status, reason="files")
    assert joined(files, report(RIGHT)) == files
    assert joined(files, report(NOISE)) == files


@pytest.mark.parametrize("labels", [{}, {STATUS_LABEL: "proven", REASON_LABEL: "I say so"}, {STATUS_LABEL: ""}])
def test_a_client_without_evidence_gets_the_measurement(labels: dict[str, str]) -> None:
    files = BaseMatch.of_labels(labels)
    assert files.status is BaseMatchStatus.UNPROVEN
    assert joined(files, report(RIGHT)).verdict == "green"
    assert joined(files, report(NOISE)).verdict == "amber"


@pytest.mark.parametrize(
    ("status", "says", "colour"),
    [
        (BaseMatchStatus.CONFIRMED, "base model confirmed: ", "green"),
        (BaseMatchStatus.UNPROVEN, "base model unproven: ", "bold yellow"),
        (BaseMatchStatus.TRUSTED, "base model taken on trust: ", "bold yellow"),
    ],
)
def test_the_summary_says_it_once_before_the_warnings(status: BaseMatchStatus, says: str, colour: str) -> None:
    found = BaseMatch(status=status, reason="what is known")
    result = ExportResult(
        export_id="e-1",
        timestamp=datetime(2026, 11, 21, tzinfo=UTC),
        success=True,
        formats={"pytorch": FormatResult(digest="sha256:0", size_bytes=1)},
        base_match=found,
        warnings=("another warning", found.reason),
    )
    console = Console(width=200, file=io.StringIO(), color_system="standard", force_terminal=True)
    segments = list(console.render(summary(result), console.options))
    text = "".join(segment.text for segment in segments)
    assert text.count("what is known") == 1
    assert text.index(says) < text.index("another warning")
    (verdict,) = [segment for segment in segments if segment.text == says]
    assert verdict.style == Style.parse(colour)


def test_a_family_that_validation_does_not_know_says_nothing_of_the_base() -> None:
    found = report(())
    description = "the family of ViTModel is unknown to the validation, so it was not run"
    reference = Reference(description=description, engine=Engine(runtime=""))
    inputs = found.inputs.model_copy(update={"family": "", "comparison": ""})
    measured = measure(found.model_copy(update={"reference": reference, "inputs": inputs}))
    assert not measured.helps
    assert measured.reason == description


def test_a_family_that_predicts_no_text_says_nothing_of_the_base() -> None:
    found = report(())
    reference = found.reference.model_copy(
        update={"perplexity": None, "base_perplexity": None, "adapter_effect_kl": 0.3}
    )
    inputs = found.inputs.model_copy(update={"family": "sequence classifier", "comparison": "classes"})
    measured = measure(found.model_copy(update={"reference": reference, "inputs": inputs}))
    assert not measured.helps
    assert measured.reason.startswith("not enough evidence, because a text alone does not tell")
    assert "train.jsonl" in measured.reason


def with_evidence(found: ValidationReport, *evidence: AdapterEvidence) -> ValidationReport:
    return found.model_copy(update={"reference": found.reference.model_copy(update={"evidence": evidence})})


def own(gains: tuple[float | None, ...]) -> AdapterEvidence:
    name = "text beside the run (train.jsonl)"
    return AdapterEvidence(text=name, perplexity=20.0, base_perplexity=60.0, gain_per_window=gains)


def labelled(correct: int, *, labels: int = 40, commonest: int = 22) -> AdapterEvidence:
    return AdapterEvidence(text="your test inputs", labels=labels, correct=correct, commonest=commonest)


def test_text_of_the_run_gives_an_answer_where_the_built_in_text_gives_none() -> None:
    built_in = report(NOISE, held_out=False)
    assert joined(UNPROVEN, built_in).verdict == "amber"
    found = joined(UNPROVEN, with_evidence(built_in, own(RIGHT)))
    assert (found.status, found.verdict) == (BaseMatchStatus.MEASURED, "green")
    assert found.reason == (
        "the adapter lowers perplexity from 60 to 20 on text beside the run (train.jsonl) (in 10 of 10 windows)"
    )


def test_noise_on_text_of_the_run_is_said_of_that_text() -> None:
    found = measure(with_evidence(report(NOISE, held_out=False), own(NOISE)))
    assert not found.helps
    assert "on text beside the run" in found.reason


def test_held_out_text_still_confirms_a_base_where_the_other_text_is_little() -> None:
    assert measure(with_evidence(report(RIGHT), own((0.9,)))).helps


@pytest.mark.parametrize(
    ("evidence", "helps", "says"),
    [
        (labelled(38), True, "finds 38 of 40 labels of your test inputs"),
        (labelled(24), False, "finds only 24 of 40"),
        (labelled(9, labels=9, commonest=5), False, "not enough evidence"),
        (labelled(40, commonest=40), False, "not enough evidence"),
    ],
)
def test_a_classifier_is_judged_by_its_labels(evidence: AdapterEvidence, helps: bool, says: str) -> None:
    found = report(())
    reference = found.reference.model_copy(
        update={"perplexity": None, "base_perplexity": None, "evidence": (evidence,)}
    )
    inputs = found.inputs.model_copy(update={"family": "sequence classifier", "comparison": "classes"})
    measured = measure(found.model_copy(update={"reference": reference, "inputs": inputs}))
    assert measured.helps is helps
    assert says in measured.reason
