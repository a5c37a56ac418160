"""Find text like that of an adapter's training: what calibration reads, or a dataset file beside the checkpoint."""

from __future__ import annotations

from pathlib import Path

from slipway.base_match import BaseMatch, BaseMatchStatus
from slipway.configuration import ExportConfiguration
from slipway.configuration.calibration import SAMPLE_OF_RUN
from slipway.documents.reading import SUFFIXES, document_files
from slipway.errors import ArtifactError
from slipway.files.links import file_in

LARGEST = 64 << 20
"""Largest file, bytes: a few passages are read of it, and all of it is stored."""
_STEMS = ("train", "training", "train_data", "training_data", "dataset", "data")
_FOLDERS = ("", "data", "dataset")


def find_own_text(
    configuration: ExportConfiguration, checkpoint: Path | None, calibration: Path | None, match: BaseMatch | None
) -> Path | None:
    """Return a file of text like the adapter's training; None without one, or where files prove the base model anyway.

    Args:
        configuration: Settings of the export.
        checkpoint: Folder of the checkpoint on this machine; None for another place, or without an adapter.
        calibration: File or folder with the text for calibration, if there is one.
        match: The verdict of the files on the base model; None if it is not known yet.
    """
    validation = configuration.validation
    unproven = match is None or match.status is BaseMatchStatus.UNPROVEN
    if not (validation.enabled and validation.compare_outputs and unproven):
        return None
    return next(filter(_is_usable, [*_of_calibration(calibration), *_beside(checkpoint)]), None)


def _of_calibration(path: Path | None) -> list[Path]:
    """Return the files of the text for calibration: every file of a folder may be enough."""
    return [] if path is None else document_files(path)


def _beside(checkpoint: Path | None) -> list[Path]:
    """Return the places of a dataset in the checkpoint and in its run, the likeliest first."""
    if checkpoint is None:
        return []
    runs = [checkpoint, *([checkpoint.parent] if checkpoint.name.startswith("checkpoint-") else [])]
    names = [SAMPLE_OF_RUN, *(f"{stem}{suffix}" for suffix in SUFFIXES for stem in _STEMS)]
    return [run / folder / name for run in runs for folder in _FOLDERS for name in names]


def _is_usable(path: Path) -> bool:
    """Return whether a file can be stored and read. Nobody named it, so one that cannot, such as a link to elsewhere, ends nothing."""
    if path.suffix.lower() not in SUFFIXES:
        return False
    try:
        found = file_in(path.parent, path.name)
        return found is not None and 0 < found.stat().st_size <= LARGEST
    except (OSError, ArtifactError):
        return False
