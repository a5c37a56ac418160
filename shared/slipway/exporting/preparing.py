"""Prepare an export: store or upload its sources, or leave their addresses to a worker, and compute its id.

The same configuration, sources and tools give the same id, so the same command resumes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.artifacts import Artifacts
from slipway.base_match import BaseMatch
from slipway.configuration import ExportConfiguration, LoadedConfiguration
from slipway.configuration.calibration import SAMPLE_OF_RUN, may_read_text
from slipway.distribution import own_version
from slipway.errors import ConfigurationError, ModelExportError
from slipway.export_sources.discovery import (
    Sources,
    base_label,
    checkpoint_labels,
    choose_checkpoint,
    clean_labels,
    files_by_name,
    find_sources,
    inputs_to_answer,
    name_of_base,
    plain_name,
    text_for_calibration,
    whole_model_warnings,
)
from slipway.export_sources.naming import source_settings, title
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
from slipway.progress.observer import Observer
from slipway.registry import load_stage, stage_names
from slipway.sources.folders import SourceFolders, describe_reading, store_files
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


@dataclass(frozen=True)
class Prepared:
    """An export that is about to be created.

    Attributes:
        identity: Its id; empty if the coordinator chooses it. The same sources and settings are the same export, but the content at an
            address may change.
        request_id: Name that distinguishes requests with addresses of sources; empty if ``identity`` does.
        digests: Digests of the sources in the store, by name.
        labels: Readable names of the sources, as far as they are known here.
        formats: Storage formats of the sources that must be prepared first.
        warnings: Warnings about the sources.
    """

    identity: str
    request_id: str
    digests: Mapping[str, str]
    labels: Mapping[str, str]
    formats: Mapping[str, str]
    warnings: tuple[str, ...]


def prepare_sources(
    loaded: LoadedConfiguration,
    folders: SourceFolders,
    store: Artifacts,
    observer: Observer,
    *,
    imports: Mapping[str, str],
    request_id: str,
    check: Callable[[Sources], Sequence[str]] = lambda _: (),
) -> Prepared:
    """Put the sources into the store, except those that a worker will import; tell their title and the warnings.

    Args:
        loaded: The configuration with its warnings.
        folders: Places of the sources.
        store: Store that receives them.
        observer: Receives title, warnings and progress.
        imports: Addresses of the sources that a worker imports, by name.
        request_id: Name of the request; chosen here if it is needed and empty.
        check: Function that returns further warnings about sources that are all here.
    """

    def on_bytes(name: str, done: int, total: int) -> None:
        observer.note(describe_reading(name, done, total))

    def announce(heading: str, warnings: Sequence[str]) -> None:
        if heading:
            observer.title(heading)
        for warning in dict.fromkeys((*loaded.warnings, *warnings)):
            observer.log(logging.WARNING, warning)

    configuration = loaded.configuration
    if imports:
        uploads = find_uploads(configuration, folders, imports)
        announce(title(uploads.labels), uploads.warnings)
        digests = store_files(uploads.files, folders, store, on_bytes=on_bytes)
        return Prepared("", request_id or uuid.uuid4().hex, digests, uploads.labels, {}, uploads.warnings)
    sources = find_sources(configuration, folders, origins=loaded.origins)
    warnings = (*sources.warnings, *check(sources))
    announce(sources.title, warnings)
    digests = store_files(sources.files(), sources.folders, store, on_bytes=on_bytes)
    identity = export_identity(configuration, digests, base_match=sources.base_match)
    return Prepared(identity, request_id, digests, sources.labels(), sources.formats, warnings)


def export_identity(
    configuration: ExportConfiguration, digests: Mapping[str, str], *, base_match: BaseMatch | None
) -> str:
    """Return a 20-character id for these sources, this configuration and the installed software.

    The verdict of the files on the base model is part of it: if that changes, the export is another one, with the same stored
    results. Log settings are not part of it, and neither are the places where it is published. Library versions are, because another version may give other results.
    """
    document = {
        "configuration": configuration.model_dump(
            mode="json", exclude={"log": True, "output": {"destinations", "license"}}
        ),
        "sources": dict(sorted(digests.items())),
        "base_match": base_match.status.value if base_match else "",
        "software": {"slipway": own_version(), **_stage_versions()},
    }
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"e-{hashlib.sha256(canonical.encode()).hexdigest()[:18]}"


def _stage_versions() -> dict[str, Any]:
    stages: dict[str, Any] = {}
    for name in stage_names():
        try:
            stage = load_stage(name)
        except ConfigurationError:  # its extra is not installed; an export that needs it reports that
            continue
        stages[name] = [stage.version, stage.library_versions(), [str(provider) for provider in stage.providers()]]
    return stages
