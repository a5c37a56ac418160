"""Write the output directory: a folder per format, the report, the lineage and a checksum of every file.

The directory is built in a hidden sibling folder and then renamed, so that it is either complete or absent. A sibling that a killed
command left behind is removed by the next command.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC
from pathlib import Path
from typing import Any

from slipway.artifacts import Artifacts
from slipway.artifacts.files import SMALL_BYTES, copy_file, reflink
from slipway.artifacts.store import OnBytes
from slipway.configuration import render_name
from slipway.configuration.sections import OutputConfiguration
from slipway.distribution import own_version
from slipway.errors import ArtifactError, ConfigurationError
from slipway.files.checksums import MANIFEST, changed_files, read_checksums, verify_directory, write_checksums
from slipway.files.json_documents import read_json
from slipway.files.paths import open_unlinked
from slipway.files.work_folders import publish, unfinished
from slipway.machine.shortages import is_disk_full
from slipway.planning.references import Output, Source
from slipway.registry import IMPORT, load_stage
from slipway.results.outcome import delivered_formats, export_id
from slipway.rpc.values import dict_of
from slipway.texts import quoted
from slipway_protos.v1 import export_pb2 as pb

__all__ = ["LINEAGE", "MANIFEST", "REPORT", "check_target", "deliver", "lineage", "tool_versions", "verify_directory"]

LINEAGE, REPORT = "lineage.json", "report.json"
_SHOWN_FACTS = ("statistics", "profile", "sound")
_LONGEST_NAME = 200
"""File systems take 255 bytes; the unfinished directory has a longer name."""
_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def deliver(
    export: pb.Export,
    target: Path,
    *,
    store: Artifacts,
    describe: Callable[[Path], None],
    on_bytes: OnBytes | None = None,
) -> bool:
    """Write an export's formats into a directory.

    Args:
        export: An ended export.
        target: The directory; an earlier delivery of the same export is kept if complete, and otherwise replaced.
        store: Store of the artifacts.
        describe: Called with the unfinished directory, to write the report into it.
        on_bytes: Called with the size of each piece; an exception from it ends the delivery, and nothing is delivered.

    Returns:
        False if the directory already existed and was complete.

    Raises:
        ArtifactError: ``OUTPUT_EXISTS`` if the directory holds something else; ``ARTIFACT_NOT_FOUND``, ``ARTIFACT_CORRUPT``,
            ``DISK_FULL`` or ``FILE_ERROR``.
    """
    formats = delivered_formats(export)
    check_target(target, export_id(export))
    if _is_complete(target, lineage(export), formats, store=store):
        return False
    with _translate_output_errors(target), unfinished(target) as folder:
        for name, digest in formats.items():
            store.fetch(digest, folder / name, on_bytes=on_bytes)
            _detach_from_store(folder / name)
        describe(folder)
        document = json.dumps(lineage(export), indent=2, sort_keys=True)
        (folder / LINEAGE).write_text(document + "\n", encoding="utf-8")
        write_checksums(folder, known=_known_digests(formats, store))
        publish(folder, target)
    return True


def check_target(target: Path, identity: str) -> None:
    """Check, before any work, that an export may be delivered to a directory.

    Args:
        target: The directory.
        identity: Id of the export.

    Raises:
        ArtifactError: ``OUTPUT_EXISTS``; ``FILE_ERROR`` for a name that is too long for a file system.
    """
    if len(os.fsencode(target.name)) > _LONGEST_NAME:
        raise ArtifactError(
            f"the output directory's name {quoted(target.name)} has more than {_LONGEST_NAME} bytes",
            reason="FILE_ERROR",
            remedy="choose a shorter output.naming_pattern",
            about={"folder": target},
        )
    if not os.path.lexists(target) or (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
        return
    if target.is_dir() and not target.is_symlink() and _read_lineage(target).get("export_id") == identity:
        return
    raise ArtifactError(
        f"{target} already holds something else",
        reason="OUTPUT_EXISTS",
        remedy="choose another output.directory or naming_pattern, or move the folder away",
        about={"folder": target},
    )


def naming_values(export: pb.Export) -> dict[str, str]:
    """Return the values of the placeholders in the names of outputs and destinations."""
    return {
        "model_name": export.labels["model_name"],
        "checkpoint": export.labels.get("checkpoint") or export.labels["model_name"],
        "export_id": export_id(export),
        "timestamp": f"{export.create_time.ToDatetime(UTC):%Y%m%d_%H%M%S}",
    }


def output_directory(export: pb.Export, output: OutputConfiguration) -> Path:
    """Return the folder of an export's delivery. Its timestamp is the export's creation, so that a resumed export finds it again."""
    return Path(output.directory) / render_name(output.naming_pattern, naming_values(export))


def lineage(export: pb.Export) -> dict[str, Any]:
    """Return the origin of an export's outputs: sources, every task with its parameters, and the tools' versions."""
    done = [task for task in export.tasks if task.state == pb.TASK_STATE_SUCCEEDED]
    outputs = {str(Output(task.id, name)): digest for task in done for name, digest in task.outputs.items()}
    known = outputs | {str(Source(name)): digest for name, digest in export.sources.items()}
    imports = [dict_of(task.facts).get("urls") for task in done if task.stage == IMPORT]
    imported = {name: url for urls in imports if isinstance(urls, dict) for name, url in urls.items()}
    return {
        "export_id": export_id(export),
        "created": export.create_time.ToJsonString(),
        "sources": dict(sorted(export.sources.items())),
        **({"imported_from": imported} if imported else {}),
        "labels": dict(sorted(export.labels.items())),
        "outputs": dict(sorted(export.outputs.items())),
        "tasks": [
            {
                "id": task.id,
                "stage": task.stage,
                "params": dict_of(task.attempts[-1].params if task.attempts else task.params),
                "inputs": {name: known.get(source, source) for name, source in sorted(task.inputs.items())},
                "outputs": dict(sorted(task.outputs.items())),
                **{name: value for name in _SHOWN_FACTS if isinstance(value := facts.get(name), dict)},
            }
            for task in done
            for facts in (dict_of(task.facts),)
        ],
        "tools": tool_versions(sorted({task.stage for task in done})),
    }


def tool_versions(stages: list[str]) -> dict[str, Any]:
    """Return the installed versions of Slipway, Python and the libraries of some stages."""
    versions: dict[str, Any] = {"slipway": own_version(), "python": platform.python_version()}
    for name in stages:
        with contextlib.suppress(ConfigurationError):  # it ran on another machine, and is not installed here
            stage = load_stage(name)
            versions[name] = {"version": stage.version, **stage.library_versions()}
    return versions


def _read_lineage(folder: Path) -> dict[str, Any]:
    try:
        document = read_json(folder / LINEAGE)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _is_complete(target: Path, expected: Mapping[str, Any], formats: Mapping[str, str], *, store: Artifacts) -> bool:
    """Return whether an earlier delivery has the same outputs, and every file is as it was delivered.

    A file is read again if its change time, which only the system sets, is later than the list of checksums.
    """
    if _read_lineage(target).get("outputs") != expected["outputs"]:
        return False
    known = {name: digest.removeprefix("sha256:") for name, digest in _known_digests(formats, store).items()}
    try:
        listed = read_checksums(target)
        written = (target / MANIFEST).stat().st_ctime_ns
        if not known.items() <= listed.items():
            return False
        return not changed_files(target, listed, since=written)
    except (ArtifactError, OSError):
        return False


@contextlib.contextmanager
def _translate_output_errors(target: Path) -> Iterator[None]:
    """Translate errors of the output's file system: name the output, and say that finished results are kept."""
    kept = "free space there or choose another output.directory; all results are kept, only the delivery is repeated"
    try:
        yield
    except ArtifactError as error:
        if error.reason != "DISK_FULL":
            raise
        raise ArtifactError(
            f"no space left to deliver to {target}", reason="DISK_FULL", remedy=kept, about={"folder": target}
        ) from error
    except OSError as error:
        full = is_disk_full(error)
        raise ArtifactError(
            f"cannot deliver to {target}: {error.strerror or error}",
            reason="DISK_FULL" if full else "FILE_ERROR",
            remedy=kept if full else "make it writable or choose another output.directory; all results are kept",
            about={"folder": target},
        ) from error


def _detach_from_store(folder: Path) -> None:
    """Replace hard links by clones or copies, so that editing a delivered file changes neither the store nor the base model.

    Large read-only files share their content only with other names in the same folder.
    """
    names: dict[int, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        if stat.S_ISREG(info.st_mode) and info.st_nlink > 1:
            names.setdefault(info.st_ino, []).append(path)
    for paths in names.values():
        _detach(paths)


def _detach(paths: Sequence[Path]) -> None:
    """Replace all names of one file in a folder; a large file is copied once for all of them."""
    copy: Path | None = None
    with open_unlinked(paths[0]) as file:
        info = os.fstat(file.fileno())
        large = info.st_size > SMALL_BYTES and not info.st_mode & _WRITABLE
        for path in paths:
            new, mode = path.with_name(f".{path.name}.new"), 0o644
            try:
                reflink(file, new)
            except OSError:
                new.unlink(missing_ok=True)
                if large and copy:
                    new.hardlink_to(copy)
                else:
                    copy_file(file, new)
                if large and len(paths) > 1:
                    mode = 0o444  # a change would reach the other names too
            new.chmod(mode)
            new.replace(path)
            copy = path


def _known_digests(formats: Mapping[str, str], store: Artifacts) -> dict[str, str]:
    """Return the digests of the artifacts' files by path; the store verified them when it fetched the files."""
    return {
        f"{name}/{file.path}": file.digest for name, digest in formats.items() for file in store.manifest(digest).files
    }
