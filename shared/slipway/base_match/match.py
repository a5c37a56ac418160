"""The verdict on a base model, passed on from the command to the report; without evidence in files, validation's figures decide it.

An adapter helps the model it was trained on, and hardly any other. Measured on the sample (10 windows of 128 tokens): the right
base gains 0.80 ± 0.08 nats per token on held-out text and 1.09 ± 0.20 on the built-in text; 11 models of equal shapes with
other weights gain between -0.03 and 0.10 with a standard error of about the same size, and none more than 1.8 standard errors.
A close relative of the right base gains nearly as much, so only files can tell them apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field

from slipway.texts import counted, one_line
from slipway.validation.findings import AdapterEvidence, Reference, ValidationReport

STATUS_LABEL, REASON_LABEL = "base_match", "base_match_reason"
"""Labels of an export that carry the verdict of the files."""

_REASON_BYTES = 1500  # a coordinator accepts labels of up to 2,048 bytes

LEAST_GAIN = 0.02
"""Nats per token that the adapter must gain on held-out text, however small the error: 2 % of the perplexity."""
LEAST_GAIN_ELSEWHERE = 0.1
"""The same on other text: the built-in text, which any model may have seen and no adapter was trained for, and text of the training,
whose form adapters learn first."""
LEAST_WINDOWS = 3
LEAST_LABELS = 10

_STUDENT_T = (6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764)
"""99 % quantiles of Student's t (one-sided) with 2, 3, … degrees of freedom; the last one also serves for more."""
_NORMAL = 2.326
"""99 % quantile of the normal distribution (one-sided)."""
_GIVE = "put a sample of the training data beside the run (train.jsonl), or set validation.heldout"
_LABEL = "put labelled examples beside the run (train.jsonl), or set validation.test_input_samples"
_LABELLED = "classifier"


class BaseMatchStatus(StrEnum):
    """Evidence for the base model in use."""

    CONFIRMED = "confirmed"
    """Files: it is the model that the adapter names, or has its weights."""
    MEASURED = "measured"
    """Validation: the adapter clearly helps it on text."""
    UNPROVEN = "unproven"
    """Neither files nor validation can tell."""
    TRUSTED = "trusted"
    """Files contradict it, and the user set ``base_model.trust: true``."""


_HEADLINES = {
    BaseMatchStatus.CONFIRMED: "Base model confirmed",
    BaseMatchStatus.MEASURED: "Base model confirmed by measurement",
    BaseMatchStatus.UNPROVEN: "Base model unproven",
    BaseMatchStatus.TRUSTED: "Base model taken on trust",
}


class BaseMatch(BaseModel):
    """Verdict on whether the base model in use is the one the adapter was trained on; a proven mismatch is refused instead.

    Attributes:
        status: The evidence for it.
        reason: The evidence, in one sentence.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    status: BaseMatchStatus
    reason: str

    @computed_field  # type: ignore[prop-decorator] # mypy has no rule for decorators above property
    @property
    def verdict(self) -> Literal["green", "amber"]:
        """Green if files or validation confirm the base, otherwise amber."""
        proven = (BaseMatchStatus.CONFIRMED, BaseMatchStatus.MEASURED)
        return "green" if self.status in proven else "amber"

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        return _HEADLINES[self.status]

    def labels(self) -> dict[str, str]:
        """Return this verdict as labels of an export."""
        reason = one_line(self.reason).encode()[:_REASON_BYTES].decode(errors="ignore")
        return {STATUS_LABEL: self.status.value, REASON_LABEL: reason}

    @classmethod
    def of_labels(cls, labels: Mapping[str, str]) -> BaseMatch:
        """Return the verdict in an export's labels; unproven if the client gave none."""
        try:
            status = BaseMatchStatus(labels.get(STATUS_LABEL, ""))
        except ValueError:  # set by another program, or by a newer client
            status = BaseMatchStatus.UNPROVEN
        reason = labels.get(REASON_LABEL) or "the base model was not compared with the one the adapter names"
        return cls(status=status, reason=reason)


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
    measured = measure(report)
    if measured.helps:
        return BaseMatch(status=BaseMatchStatus.MEASURED, reason=measured.reason)
    return BaseMatch(status=BaseMatchStatus.UNPROVEN, reason=f"{files.reason}; {measured.reason}")


def measure(report: ValidationReport | None) -> Measured:
    """Judge whether the adapter clearly helps the base: by text of the run, by the test inputs, then by the validation's text.

    The mean gain must exceed both its sampling error (Student's t, 99 %) and the least gain, and the base alone must predict better
    than guessing: an improvement of a model that knows nothing proves nothing. A classifier must find clearly more labels than
    the commonest label would.
    """
    if report is None:
        return Measured(False, f"not enough evidence, because nothing was validated: enable validation, and {_GIVE}")
    judged = [_judge(each, report) for each in report.reference.evidence]
    judged.append(_judge_on_validation_text(report))
    helpful = next((each for each in judged if each.helps), None)
    return helpful or judged[0]


def _judge(evidence: AdapterEvidence, report: ValidationReport) -> Measured:
    """Judge the adapter by one text like that of its training."""
    if evidence.labels:
        return _judge_by_labels(evidence)
    return _judge_by_gains(evidence, evidence.text, least=LEAST_GAIN_ELSEWHERE, vocabulary=report.inputs.vocabulary)


def _judge_by_labels(evidence: AdapterEvidence) -> Measured:
    """Judge a classifier by its own task: one on another base finds no more labels than a guess."""
    said = f"{evidence.correct} of {evidence.labels} labels of {evidence.text}, and the commonest label would be right for {evidence.commonest}"
    if evidence.labels < LEAST_LABELS:
        return _not_enough(
            f"{evidence.text} gives {counted(evidence.labels, 'label')}, and {LEAST_LABELS} are needed", _LABEL
        )
    share = evidence.commonest / evidence.labels
    least = evidence.commonest + max(1.0, _NORMAL * math.sqrt(evidence.labels * share * (1 - share)))
    if evidence.correct >= least:
        return Measured(True, f"the adapter finds {said}")
    if least > evidence.labels:
        return _not_enough(f"nearly all labels of {evidence.text} are one", _LABEL)
    return Measured(False, f"the adapter finds only {said}: check that it was trained on this base")


def _judge_on_validation_text(report: ValidationReport) -> Measured:
    """Judge the adapter by the windows of the held-out or built-in text."""
    reference, held_out = report.reference, report.inputs.held_out
    if reference.base_perplexity is None or reference.perplexity is None or not reference.gain_per_window:
        return Measured(False, _explain_missing_gain(report))
    text, least = ("held-out text", LEAST_GAIN) if held_out else ("the built-in text", LEAST_GAIN_ELSEWHERE)
    advice = "" if held_out else f": {_GIVE}"
    return _judge_by_gains(reference, text, least=least, vocabulary=report.inputs.vocabulary, advice=advice)


def _judge_by_gains(
    evidence: AdapterEvidence | Reference, text: str, *, least: float, vocabulary: int, advice: str = ""
) -> Measured:
    """Judge the adapter by what it saves in each window."""
    gains = [gain for gain in evidence.gain_per_window if gain is not None]
    base, tuned = evidence.base_perplexity, evidence.perplexity
    if len(gains) < max(LEAST_WINDOWS, len(evidence.gain_per_window)) or base is None or tuned is None:
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


def _explain_missing_gain(report: ValidationReport) -> str:
    """Say why validation did not measure what the adapter does."""
    reference = report.reference
    if not report.inputs.family:
        return reference.description
    if reference.adapter_effect_kl is None and reference.adapter_effect_error is None:
        return "not enough evidence, because base + adapter were not compared with the base: set validation.compare_outputs"
    family = report.inputs.family
    remedy = f": {_LABEL}" if _LABELLED in family else ""
    return f"not enough evidence, because a text alone does not tell whether the adapter helps a {family}{remedy}"
