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
from slipway.validation.findings import ValidationReport

LEAST_GAIN = 0.02
"""Nats per token that the adapter must gain on held-out text, however small the error: 2 % of the perplexity."""
LEAST_GAIN_BUILT_IN = 0.1
"""The same on the built-in text, which any model may have seen and no adapter was trained for."""
LEAST_WINDOWS = 3

_STUDENT_T = (6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764)
"""99 % quantiles of Student's t (one-sided) with 2, 3, … degrees of freedom; the last one also serves for more."""
_HELDOUT = "set validation.heldout to text of the kind the adapter was trained for"


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
    """Return whether base + adapter predict the text clearly better than the base alone, by the gain in each window.

    The mean gain must exceed both its sampling error (Student's t, 99 %) and :data:`LEAST_GAIN`, and the base alone must predict
    better than guessing: an improvement of a model that knows nothing proves nothing.
    """
    if report is None:
        return Measured(False, f"nothing was validated: enable validation, and {_HELDOUT}")
    reference, held_out = report.reference, report.inputs.held_out
    base, tuned = reference.base_perplexity, reference.perplexity
    if base is None or tuned is None or not reference.gain_per_window:
        return Measured(False, _without_gain(report))
    gains = [gain for gain in reference.gain_per_window if gain is not None]
    if len(gains) < max(LEAST_WINDOWS, len(reference.gain_per_window)):
        return Measured(
            False, f"{len(gains)} windows of text are too few to judge by: at least {LEAST_WINDOWS} are needed"
        )
    text = "held-out text" if held_out else "the built-in text"
    if report.inputs.vocabulary and base >= report.inputs.vocabulary:
        guessing = f"perplexity {base:.0f}, with {report.inputs.vocabulary} tokens to choose from"
        return Measured(False, f"the base alone predicts {text} no better than guessing ({guessing})")
    mean, error = statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    quantile = _STUDENT_T[min(len(gains) - LEAST_WINDOWS, len(_STUDENT_T) - 1)]
    if mean >= max(quantile * error, LEAST_GAIN if held_out else LEAST_GAIN_BUILT_IN):
        windows = f"in {sum(gain > 0 for gain in gains)} of {len(gains)} windows"
        return Measured(True, f"the adapter lowers perplexity from {base:.3g} to {tuned:.3g} on {text} ({windows})")
    found = f"from {base:.3g} to {tuned:.3g}, a gain of {mean:.2f} ± {error:.2f} nats per token"
    advice = "" if held_out else f": {_HELDOUT}"
    return Measured(False, f"the adapter does not clearly lower perplexity on {text} ({found}){advice}")


def _without_gain(report: ValidationReport) -> str:
    """Say why validation did not measure what the adapter saves."""
    reference = report.reference
    if not report.inputs.family:
        return reference.description
    if reference.adapter_effect_kl is None and reference.adapter_effect_error is None:
        return "validation did not compare base + adapter with the base: set validation.compare_outputs"
    return f"what a {report.inputs.family} gives on the text does not tell whether the adapter helps it"
