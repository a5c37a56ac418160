"""Find text for calibration and held-out text, named by the user or beside a run, and tell before anything runs if they overlap."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from slipway.artifacts.store import ActionResult, Artifacts
from slipway.base_match import BaseMatch, BaseMatchStatus
from slipway.configuration import ExportConfiguration
from slipway.configuration.calibration import SAMPLE_OF_RUN, depends_on_text, with_method
from slipway.distribution import own_version
from slipway.documents.heldout import join_documents, read_held_out
from slipway.documents.reader import SUFFIXES, Purpose, document_files, read_documents
from slipway.documents.rendering import Contents, passages
from slipway.errors import ArtifactError, ConfigurationError, QuantizationError
from slipway.export_sources.naming import source_settings
from slipway.files.paths import file_in
from slipway.files.regular_file import sha256_of
from slipway.planning.calibration import check_texts_apart, same_text_error
from slipway.sizes import format_size
from slipway.sources import SourceFolders

CALIBRATION_KEY, HELDOUT_KEY = "optimization.calibration", "validation.heldout"
MOST_BYTES = 4 << 30
"""Largest size of all files: far more than is read of them, and little enough to be stored and sent."""
_MOST_FILES = 10_000
_REMEDIES = {
    CALIBRATION_KEY: "name a file or folder with a sample of the training data, or leave the setting out",
    HELDOUT_KEY: "name a file or folder with some text that the model was not trained on, or leave the setting out to use the "
    "built-in text",
}

LARGEST = 64 << 20
"""Largest file, bytes: only a few passages of it are read, but all of it is stored."""
_REMEMBERED_BYTES = 64 << 20
"""Most bytes of two texts whose comparison a store remembers: of larger ones only a part is read, and their digests would take longer."""
_STEMS = ("train", "training", "train_data", "training_data", "dataset", "data")
_FOLDERS = ("", "data", "dataset")


def check_texts(path: Path, key: str) -> Path:
    """Return the file or folder that a setting names.

    Raises:
        ConfigurationError: It is neither, holds no text, or is too large.
    """
    files = text_files(path)
    size = sum(file.stat().st_size for file in files)
    if not files:
        fault = "is not there" if not path.exists() else f"has no file that ends in {', '.join(SUFFIXES)}"
    elif len(files) > _MOST_FILES:
        fault = f"has more than {_MOST_FILES:,} files"
    elif size > MOST_BYTES:  # all of it would be read to store it
        fault = f"has {format_size(size)}, and {format_size(MOST_BYTES)} are allowed"
    else:
        return path
    raise ConfigurationError(f"{key}: {path} {fault}", remedy=_REMEDIES[key], about={"key": key})


def text_files(path: Path) -> list[Path]:
    """Return the files of text in a folder, sorted, or the file itself; none if there are none."""
    return [file for file in document_files(path) if file.is_file()]


def folder_of(path: Path) -> Path:
    """Return the folder that the names of the files are relative to."""
    return path if path.is_dir() else path.parent


def sample_of_run(checkpoint: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Return the sample of training data beside a checkpoint or its run, and warnings; a sample that is too large is left out."""
    folders = [checkpoint, *([checkpoint.parent] if checkpoint.name.startswith("checkpoint-") else [])]
    sample = next((folder / SAMPLE_OF_RUN for folder in folders if (folder / SAMPLE_OF_RUN).is_file()), None)
    size = sample.stat().st_size if sample else 0
    if size <= MOST_BYTES:
        return sample, ()
    allowed = f"{format_size(size)}, and {format_size(MOST_BYTES)} are allowed"
    return None, (
        f"{sample} is not used for calibration: it has {allowed}; name a smaller sample in {CALIBRATION_KEY}",
    )


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
    texts = [] if calibration is None else document_files(calibration)  # every file of a folder may be enough
    return next(filter(_is_usable, [*texts, *_dataset_places(checkpoint)]), None)


def _dataset_places(checkpoint: Path | None) -> list[Path]:
    """Return the places of a dataset in the checkpoint and in its run, the likeliest first."""
    if checkpoint is None:
        return []
    runs = [checkpoint, *([checkpoint.parent] if checkpoint.name.startswith("checkpoint-") else [])]
    names = [SAMPLE_OF_RUN, *(f"{stem}{suffix}" for suffix in SUFFIXES for stem in _STEMS)]
    return [run / folder / name for run in runs for folder in _FOLDERS for name in names]


def _is_usable(path: Path) -> bool:
    """Return whether a file can be stored and read. The user did not name it, so an unusable one, such as a link to elsewhere, is skipped."""
    if path.suffix.lower() not in SUFFIXES:
        return False
    try:
        file = file_in(path.parent, path.name)
        return file is not None and 0 < file.stat().st_size <= LARGEST
    except (OSError, ArtifactError):
        return False


def check_apart(
    configuration: ExportConfiguration, folders: SourceFolders, *, calibration: Path | None, heldout: Path | None
) -> tuple[str, ...]:
    """Compare the contents of the text for calibration and the held-out text; return a warning of what will be left out.

    The stage that chooses the text compares again, with the model's tokenizer: here, only what certainly leaves too little is an error.

    Args:
        configuration: Settings of the export.
        folders: The folders that found both; those of a bucket have no contents to compare.
        calibration: File or folder with text for calibration, or None.
        heldout: File or folder with held-out text, or None.

    Raises:
        QuantizationError: ``CALIBRATION_OVERLAP``, or ``CALIBRATION_DATA_INVALID`` for text that cannot be read, where the export cannot go
            on without the text for calibration.
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the held-out text cannot be read.
    """
    check_texts_apart(configuration, source_settings(configuration))
    if calibration is None or heldout is None or not all(map(folders.has_contents, (calibration, heldout))):
        return ()
    try:
        if _is_contained(calibration, heldout):
            raise same_text_error(calibration.name)
        return _compare(calibration, heldout, folders.store)
    except QuantizationError as error:
        if depends_on_text(with_method(configuration, has_text=True)):
            raise
        return (f"calibration will not use the text that it was given: {error}",)


def _is_contained(calibration: Path, heldout: Path) -> bool:
    """Return whether every file of a text for calibration is a file of the held-out text, too."""
    given = text_files(calibration)
    try:
        sizes = {file.stat().st_size for file in given}
        judged = [file for file in text_files(heldout) if file.stat().st_size in sizes]
        if not sizes <= {file.stat().st_size for file in judged}:  # sizes alone show that a file is not in it
            return False
        known = {sha256_of(file) for file in judged}
        return all(sha256_of(file) in known for file in given)
    except OSError:  # reading it as text reports the error
        return False


def _compare(calibration: Path, heldout: Path, store: Artifacts | None) -> tuple[str, ...]:
    """Compare two texts that can be read here; the store remembers those that have nothing in common."""
    given, judged = text_files(calibration), text_files(heldout)
    if not _can_read([*given, *judged]):
        return ()
    key = _comparison_key(given, judged) if store is not None else ""
    if store is not None and key and store.action(key) is not None:
        return ()
    from slipway.documents.separation import FEWEST_TOKENS, separate, too_little_left_error

    contents = Contents()
    texts = passages(read_documents(calibration, Purpose.CALIBRATION), contents)
    parted = separate(texts, join_documents(read_held_out(heldout).documents, contents))
    # A token has at least one byte.
    left = sum(len(passage.encode()) for passage in parted.kept)
    if parted.left_out and left < FEWEST_TOKENS:
        raise too_little_left_error(parted.left_out, f"{left:,} bytes" if left else "nothing")
    if parted.left_out:
        return (parted.warning(),)
    if store is not None and key:
        store.record_action(key, ActionResult({}))
    return ()


def _comparison_key(calibration: Sequence[Path], heldout: Sequence[Path]) -> str:
    """Return the key under which a store remembers that two texts are apart; empty if they are too large or cannot be read."""
    try:
        if sum(file.stat().st_size for file in (*calibration, *heldout)) > _REMEMBERED_BYTES:
            return ""
        texts = [[[file.name, sha256_of(file)] for file in files] for files in (calibration, heldout)]
    except OSError:  # reading it as text reports the error
        return ""
    return hashlib.sha256(json.dumps({"apart": texts, "software": own_version()}).encode()).hexdigest()


def _can_read(files: Sequence[Path]) -> bool:
    """Return whether this machine has the libraries; a client may send what only workers can read."""
    needs = {"numpy", *(["pyarrow"] if any(file.suffix.lower() == ".parquet" for file in files) else [])}
    return all(find_spec(name) for name in needs)
