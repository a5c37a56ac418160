"""Find out before anything runs whether text for calibration is held-out text, too."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from slipway.configuration import ExportConfiguration
from slipway.configuration.calibration import depends_on_text, with_method
from slipway.documents.heldout import held_out, joined
from slipway.documents.purposes import Purpose
from slipway.documents.reading import read_documents
from slipway.documents.rendering import Contents, passages
from slipway.errors import QuantizationError
from slipway.export_sources.naming import source_settings
from slipway.export_sources.text_files import text_files
from slipway.files.regular_file import sha256_of
from slipway.planning.calibration import check_texts_apart, same_text
from slipway.sources import SourceFolders


def check_apart(
    configuration: ExportConfiguration, folders: SourceFolders, *, calibration: Path | None, heldout: Path | None
) -> tuple[str, ...]:
    """Compare the text for calibration with the held-out text, by what both say; return a warning of what will be left out.

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
            raise same_text(calibration.name)
        return _compare(calibration, heldout)
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
        if not sizes <= {file.stat().st_size for file in judged}:  # no file is read for what its size shows
            return False
        known = {sha256_of(file) for file in judged}
        return all(sha256_of(file) in known for file in given)
    except OSError:  # reading it as text says what is wrong
        return False


def _compare(calibration: Path, heldout: Path) -> tuple[str, ...]:
    if not _can_read([*text_files(calibration), *text_files(heldout)]):
        return ()
    from slipway.documents.separation import FEWEST_TOKENS, separate, too_little_left

    contents = Contents()
    found = passages(read_documents(calibration, Purpose.CALIBRATION), contents)
    parted = separate(found, joined(held_out(heldout).documents, contents))
    # A token has at least one byte.
    left = sum(len(passage.encode()) for passage in parted.kept)
    if parted.left_out and left < FEWEST_TOKENS:
        raise too_little_left(parted.left_out, f"{left:,} bytes" if left else "nothing")
    return (parted.warning(),) if parted.left_out else ()


def _can_read(files: Sequence[Path]) -> bool:
    """Return whether this machine has the libraries; a client may send what only workers can read."""
    needs = {"numpy", *(["pyarrow"] if any(file.suffix.lower() == ".parquet" for file in files) else [])}
    return all(find_spec(name) for name in needs)
