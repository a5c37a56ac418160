"""What a page says of an export, once: a warning that the failure above it has already is left out."""

from __future__ import annotations

from slipway.console.reports import further_warnings
from slipway.errors import Failure

WHY = "onnx failed validation: mean KL 0.4 is above 0.02"
WARNINGS = (f"validate: {WHY}; leave the format out", "merge: the adapter has a dropout, which exports ignore")


def test_a_warning_that_the_failure_has_is_not_repeated() -> None:
    failure = Failure("VALIDATION_FAILED", f"2 outputs failed validation\n{WHY}\n\nonnx-int8 failed validation: …")
    assert further_warnings(WARNINGS, failure) == [WARNINGS[1]]


def test_all_warnings_of_an_export_that_did_not_fail_are_shown() -> None:
    assert further_warnings(WARNINGS, None) == list(WARNINGS)
