"""Judge the base model by validation's figures: an adapter helps the model it was trained on, and hardly any other.

Measured on the sample (10 windows of 128 tokens): the right base gains 0.80 ± 0.08 nats per token on held-out text and
1.09 ± 0.20 on the built-in text; 11 models of equal shapes with other weights gain between -0.03 and 0.10 with a standard
error of about the same size, and none more than 1.8 standard errors. A close relative of the right base gains nearly as much, so
only files can tell them apart.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from slipway.base_match.match import BaseMatch, BaseMatchStatus
from slipway.counts import counted
from slipway.validation.findings import AdapterEvidence, Reference, ValidationReport

LEAST_GAIN = 0.02
"""Nats per token that the adapter must gain on held-out text, however small the error: 2 % of the perplexity."""
LEAST_GAIN_ELSEWHERE = 0.1
"""The same on other text: on the built-in text, which any model may have seen and no adapter was trained for, and on text of the training,
of which adapters learn the form first."""
LEAST_WINDOWS = 3
LEAST_LABELS = 10

_STUDENT_T = (6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764)
"""99 % quantiles of Student's t (one-sided) with 2, 3, … degrees of freedom; the last one also serves for more."""
_NORMAL = 2.326
"""99 % quantile of the normal distribution (one-sided)."""
_GIVE = "put a sample of the training data beside the run (train.jsonl), or set validation.heldout"
_LABEL = "put labelled examples beside the run (train.jsonl), or set validation.test_input_samples"
_LABELLED = "classifier"


@dataclass(frozen=True, slots=True)
class Measured:
    """Whether the adapter clearly helps the base model in use, with the reason."""

    helps: bool
    reason: str


def joined(files: BaseMatch, report: ValidationReport | None) -> BaseMatch:
    """Combine the verdicts of files and validation; validation counts only if files cannot tell.

    Args:
        files: The verdict of the files.
        report: The validation report; None if nothing was validated.
    """
    if files.status is not BaseMatchStatus.UNPROVEN:
        return files
    found = measure(report)
    if found.helps:
        return BaseMatch(status=BaseMatchStatus.MEASURED, reason=found.reason)
    return BaseMatch(status=BaseMatchStatus.UNPROVEN, reason=f"{files.reason}; {found.reason}")


def measure(report: ValidationReport | None) -> Measured:
    """Return whether base + adapter do clearly better than the base alone: on text of the run, the test inputs, then the validation's text.

    The mean gain must exceed both its sampling error (Student's t, 99 %) and the least gain, and the base alone must predict better
    than guessing: an improvement of a model that knows nothing proves nothing. A classifier must find clearly more labels than
    the commonest label would.
    """
    if report is None:
        return Measured(False, f"not enough evidence, because nothing was validated: enable validation, and {_GIVE}")
    judged = [_judged(each, report) for each in report.reference.evidence]
    judged.append(_on_validation_text(report))
    found = next((each for each in judged if each.helps), None)
    return found or judged[0]


def _judged(found: AdapterEvidence, report: ValidationReport) -> Measured:
    """Judge the adapter by one text like that of its training."""
    if found.labels:
        return _by_labels(found)
    return _by_gains(found, found.text, least=LEAST_GAIN_ELSEWHERE, vocabulary=report.inputs.vocabulary)


def _by_labels(found: AdapterEvidence) -> Measured:
    """Judge a classifier by its own task: one on another base finds no more labels than a guess."""
    said = f"{found.correct} of {found.labels} labels of {found.text}, and the commonest label would be right for {found.commonest}"
    if found.labels < LEAST_LABELS:
        return _not_enough(
            f"{found.text} gives {counted(found.labels, 'label')}, and {LEAST_LABELS} are needed", _LABEL
        )
    share = found.commonest / found.labels
    least = found.commonest + max(1.0, _NORMAL * math.sqrt(found.labels * share * (1 - share)))
    if found.correct >= least:
        return Measured(True, f"the adapter finds {said}")
    if least > found.labels:
        return _not_enough(f"nearly all labels of {found.text} are one", _LABEL)
    return Measured(False, f"the adapter finds only {said}: check that it was trained on this base")


def _on_validation_text(report: ValidationReport) -> Measured:
    """Judge the adapter by the windows of the held-out or built-in text."""
    reference, held_out = report.reference, report.inputs.held_out
    if reference.base_perplexity is None or reference.perplexity is None or not reference.gain_per_window:
        return Measured(False, _without_gain(report))
    text, least = ("held-out text", LEAST_GAIN) if held_out else ("the built-in text", LEAST_GAIN_ELSEWHERE)
    advice = "" if held_out else f": {_GIVE}"
    return _by_gains(reference, text, least=least, vocabulary=report.inputs.vocabulary, advice=advice)


def _by_gains(
    found: AdapterEvidence | Reference, text: str, *, least: float, vocabulary: int, advice: str = ""
) -> Measured:
    """Judge the adapter by what it saves in each window."""
    gains = [gain for gain in found.gain_per_window if gain is not None]
    base, tuned = found.base_perplexity, found.perplexity
    if len(gains) < max(LEAST_WINDOWS, len(found.gain_per_window)) or base is None or tuned is None:
        return _not_enough(f"{text} gives {counted(len(gains), 'window')}, and {LEAST_WINDOWS} are needed", _GIVE)
    if vocabulary and base >= vocabulary:
        guessing = f"perplexity {base:.0f}, with {vocabulary} tokens to choose from"
        return Measured(False, f"the base alone predicts {text} no better than guessing ({guessing})")
    mean, error = statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    quantile = _STUDENT_T[min(len(gains) - LEAST_WINDOWS, len(_STUDENT_T) - 1)]
    if mean >= max(quantile * error, least):
        windows = f"in {sum(gain > 0 for gain in gains)} of {len(gains)} windows"
        return Measured(True, f"the adapter lowers perplexity from {base:.3g} to {tuned:.3g} on {text} ({windows})")
    figures = f"from {base:.3g} to {tuned:.3g}, a gain of {mean:.2f} ± {error:.2f} nats per token"
    return Measured(False, f"the adapter does not clearly lower perplexity on {text} ({figures}){advice}")


def _not_enough(why: str, remedy: str) -> Measured:
    return Measured(False, f"not enough evidence, because {why}: {remedy}")


def _without_gain(report: ValidationReport) -> str:
    """Say why validation did not measure what the adapter does."""
    reference = report.reference
    if not report.inputs.family:
        return reference.description
    if reference.adapter_effect_kl is None and reference.adapter_effect_error is None:
        return "not enough evidence, because base + adapter were not compared with the base: set validation.compare_outputs"
    family = report.inputs.family
    remedy = f": {_LABEL}" if _LABELLED in family else ""
    return f"not enough evidence, because a text alone does not tell whether the adapter helps a {family}{remedy}"
