"""Give faults of the machine that any code may meet their reasons: too little memory, a full disk, a file, a missing library."""

from __future__ import annotations

from slipway.distribution import translate_import_error
from slipway.errors import ArtifactError, ModelExportError, StageError
from slipway.machine.shortages import MEMORY, is_disk_full, memory_shortage


def translate_fault(error: Exception) -> ModelExportError | None:
    """Return the typed error of a known fault; None for any other exception, which is a fault of Slipway."""
    if isinstance(error, ModelExportError):
        return error
    if (short := memory_shortage(error)) is not None:
        remedy = f"{short.remedy}; see also ulimit -v" if short is MEMORY else short.remedy
        return StageError(f"out of {short.of} ({type(error).__name__}: {error})", reason=short.reason, remedy=remedy)
    if isinstance(error, ModuleNotFoundError) and (translated := translate_import_error(error)) is not None:
        return translated
    if not isinstance(error, OSError):
        return None
    name = f"{error.filename}: " if error.filename else ""
    what = f"{name}{error.strerror or error}"
    if is_disk_full(error):
        remedy = "free space there; slipway cache gc frees space in the store"
        return ArtifactError(what, reason="DISK_FULL", remedy=remedy)
    return ArtifactError(what, reason="FILE_ERROR", remedy="check that it exists, and that you may read and write it")
