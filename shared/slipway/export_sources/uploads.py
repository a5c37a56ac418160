"""Sources that a client uploads when a worker imports the others; they are checked alone, because the others are not here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipway.configuration import ExportConfiguration
from slipway.configuration.calibration import SAMPLE_OF_RUN, may_read_text
from slipway.errors import ModelExportError
from slipway.export_sources.discovery import (
    base_label,
    checkpoint_labels,
    choose_checkpoint,
    clean_labels,
    files_by_name,
    inputs_to_answer,
    name_of_base,
    plain_name,
    text_for_calibration,
    whole_model_warnings,
)
from slipway.export_sources.naming import source_settings
from slipway.export_sources.text_files import (
    CALIBRATION_KEY,
    HELDOUT_KEY,
    check_apart,
    check_texts,
    find_own_text,
    folder_of,
    text_files,
)
from slipway.model.model_files import model_files, resolve_base_model, travelling_files
from slipway.planning.calibration import SOURCE as CALIBRATION
from slipway.sources.folders import SourceFolders
from slipway.validation.inputs import OWN_TEXT, TEST_INPUTS


@dataclass(frozen=True)
class Uploads:
    """Files to upload, by source and path inside the artifact; labels for people; warnings."""

    files: Mapping[str, Mapping[str, Path]]
    labels: Mapping[str, str]
    warnings: tuple[str, ...]


def find_uploads(configuration: ExportConfiguration, folders: SourceFolders, imports: Collection[str]) -> Uploads:
    """Find the sources that are not imported. The importing worker checks whether base and adapter belong together.

    Raises:
        ModelExportError: As :func:`slipway.export_sources.discovery.find_sources`.
    """
    try:
        return _find(configuration, folders, imports)
    except ModelExportError as error:
        raise folders.name_sources(error) from error


def _find(configuration: ExportConfiguration, folders: SourceFolders, imports: Collection[str]) -> Uploads:
    settings = source_settings(configuration)
    checkpoints = {
        name: choose_checkpoint(configuration, folders, path)
        for name, path in settings.items()
        if name.startswith("adapter") and name not in imports
    }
    files = {name: files_by_name(each.path, travelling_files(each.path)) for name, each in checkpoints.items()}
    labels: dict[str, str] = {}
    if "adapter" in checkpoints:
        labels |= checkpoint_labels(checkpoints["adapter"])
    base: Path | None = None
    if "base" not in imports:
        named = name_of_base(configuration, checkpoints.get("adapter"), here=True)
        base = resolve_base_model(str(folders.find(named)))
        files["base"] = files_by_name(base, model_files(base))
        labels["base_model"] = base_label(base, named)
        if "adapter" not in settings:
            labels["model_name"] = plain_name(base, labels["base_model"])
    heldout = None
    if "heldout" in settings and "heldout" not in imports:
        heldout = check_texts(folders.find(settings["heldout"]), HELDOUT_KEY)
        files["heldout"] = files_by_name(folder_of(heldout), text_files(heldout))
    data, notes = None, _unused_sample_warning(configuration, imports)
    if CALIBRATION not in imports:
        data, left_out = text_for_calibration(configuration, folders, checkpoints.get("adapter"), here=True)
        notes += left_out
    notes += check_apart(configuration, folders, calibration=data, heldout=heldout)
    if data is not None:
        files[CALIBRATION] = files_by_name(folder_of(data), text_files(data))
    notes += whole_model_warnings(checkpoints.values(), base)
    chosen = checkpoints.get("adapter")
    local = chosen.path if chosen is not None and folders.has_contents(chosen.path) else None
    if chosen is not None and (own := find_own_text(configuration, local, data, None)) is not None:
        files[OWN_TEXT] = files_by_name(own.parent, [own])
    if TEST_INPUTS in settings and TEST_INPUTS not in imports:
        file, sounds = inputs_to_answer(configuration, folders)
        if file is not None:
            files[TEST_INPUTS] = files_by_name(file.parent, [file, *sounds])
    warnings = (*(warning for each in checkpoints.values() for warning in each.warnings), *notes)
    return Uploads(files, clean_labels(labels), tuple(map(folders.show, warnings)))


def _unused_sample_warning(configuration: ExportConfiguration, imports: Collection[str]) -> tuple[str, ...]:
    """Warn that a run's own sample is not used if a worker imports its checkpoint, because the import brings only the adapter."""
    if "adapter" not in imports or configuration.optimization.calibration or not may_read_text(configuration):
        return ()
    instead = f"a {SAMPLE_OF_RUN} beside the imported checkpoint is not looked for; name it in {CALIBRATION_KEY}"
    return (f"calibration uses a built-in text: {instead}",)
