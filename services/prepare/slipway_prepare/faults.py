"""The errors with which this stage refuses a base model."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import CheckpointValidationError

_PLAIN = "use the 16-bit version of the base model"


def invalid_error(what: str, *, remedy: str = "download or copy the base model again", **about: object) -> Exception:
    """Return the error for a base that contradicts itself: a part is missing, left over or of the wrong shape."""
    return CheckpointValidationError(f"the base model {what}", reason="BASE_MODEL_INVALID", remedy=remedy, about=about)


def unsupported_error(what: str, *, remedy: str = _PLAIN, **about: object) -> Exception:
    """Return the error for a base whose quantization this stage cannot undo."""
    return CheckpointValidationError(
        f"the base model {what}", reason="BASE_QUANTIZATION_UNSUPPORTED", remedy=remedy, about=about
    )


def unsafe_error(path: Path, what: str) -> Exception:
    """Return the error for a pickle that could run code, or takes more than its size explains."""
    return CheckpointValidationError(
        f"{path.name} is a pickle that is not loaded: it {what}",
        reason="UNSAFE_PICKLE",
        remedy="use a safetensors revision of the model; do not load this file elsewhere unless you trust its source",
        about={"file": path},
    )


def code_error(path: Path, said: str) -> Exception:
    """Return the error for a pickle that torch refuses because it would run code."""
    first = (said.strip() or "it is not readable").splitlines()[0][:300]
    return unsafe_error(path, f"would run code when loaded: {first}")


def disk_full_error(path: Path) -> Exception:
    """Return the error for a pickle that cannot be written in a newer format."""
    return CheckpointValidationError(
        f"no space is left to write {path.name} in torch's format of today",
        reason="DISK_FULL",
        remedy="free space on the disk with the work folder (SLIPWAY_SCRATCH), or use a larger disk",
        about={"file": path},
    )
