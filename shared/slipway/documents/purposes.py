"""What a user's text is for, and the error of text that cannot be used for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from slipway.errors import ModelExportError, QuantizationError, ValidationError

_REMEDY = 'give .txt files, or a JSON object with "text" or "messages" in each line of .jsonl files, in UTF-8'


class Purpose(StrEnum):
    """What a text is for."""

    CALIBRATION = "calibration"
    HELD_OUT = "heldout"
    OWN_TEXT = "own_text"


@dataclass(frozen=True, slots=True)
class _Fault:
    subject: str
    error: type[ModelExportError]
    reason: str


_FAULTS: Mapping[Purpose, _Fault] = {
    Purpose.CALIBRATION: _Fault("text for calibration", QuantizationError, "CALIBRATION_DATA_INVALID"),
    Purpose.HELD_OUT: _Fault("held-out text", ValidationError, "VALIDATION_IMPOSSIBLE"),
    Purpose.OWN_TEXT: _Fault("text beside the run", ValidationError, "VALIDATION_IMPOSSIBLE"),
}


def invalid_text_error(purpose: Purpose, what: str, remedy: str = "", **about: object) -> ModelExportError:
    """Return the error of text that cannot be used."""
    fault = _FAULTS[purpose]
    return fault.error(f"{fault.subject}: {what}", reason=fault.reason, remedy=remedy or _REMEDY, about=about)
