"""The two errors with which this stage refuses a base model."""

from __future__ import annotations

from slipway.errors import CheckpointValidationError

_PLAIN = "use the 16-bit version of the base model"


def invalid(what: str, *, remedy: str = "download or copy the base model again", **about: object) -> Exception:
    """Return the error for a base that contradicts itself: a part is missing, left over or of the wrong shape."""
    return CheckpointValidationError(f"the base model {what}", reason="BASE_MODEL_INVALID", remedy=remedy, about=about)


def unsupported(what: str, *, remedy: str = _PLAIN, **about: object) -> Exception:
    """Return the error for a base whose quantization this stage cannot undo."""
    return CheckpointValidationError(
        f"the base model {what}", reason="BASE_QUANTIZATION_UNSUPPORTED", remedy=remedy, about=about
    )
