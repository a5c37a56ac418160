"""Read the embedded exports of this machine from their state files without changing them; find the artifacts unfinished ones use."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pydantic

from slipway.contracts.coordinator import coordinator_service
from slipway.errors import ConfigurationError, ModelExportError, ServiceError
from slipway.files.regular_file import open_regular
from slipway.rpc.values import ENDED_STATES, export_state
from slipway.settings import Settings
from slipway_protos.v1 import export_pb2 as pb

_MOST_KEPT = 512


@dataclass(frozen=True, slots=True)
class LocalExport:
    """One export of this machine.

    Attributes:
        id: Last part of its name.
        folder: Folder of its state.
        state: The export's state; ``interrupted`` if no process runs it now, ``starting``, or ``unreadable``.
        message: The export; None if it cannot be read or is not stored yet.
        problem: Why it cannot be read; empty otherwise.
    """

    id: str
    folder: Path
    state: str
    message: pb.Export | None = None
    problem: str = ""


def local_exports(settings: Settings, *, filter: str = "") -> list[LocalExport]:  # noqa: A002 - the field's name everywhere
    """Return the embedded exports of this machine, newest first; unreadable ones come last.

    Raises:
        ServiceError: ``REQUEST_INVALID`` for a filter that is not understood.
    """
    coordinator_service().check_filter(filter)  # also where there is no export to filter
    exports = []
    for state in sorted(settings.exports_path.glob("*/state.db")):
        exports += _read_state(state, filter=filter)
    return sorted(exports, key=lambda each: -each.message.create_time.ToNanoseconds() if each.message else 1)


def local_export(settings: Settings, name: str) -> LocalExport:
    """Return the export with this name or id.

    Raises:
        ServiceError: ``EXPORT_NOT_FOUND``, or ``STATE_SCHEMA`` if it cannot be read.
    """
    wanted = name.rpartition("/")[2]
    state = settings.exports_path / wanted / "state.db"
    # A folder has the name of its export.
    known = wanted not in {"", ".", ".."} and state.is_file()
    export = next((each for each in _read_state(state, filter="") if each.id == wanted), None) if known else None
    if export is None:
        raise ServiceError(
            f"no export {wanted!r} on this machine",
            reason="EXPORT_NOT_FOUND",
            remedy="slipway list shows the existing exports; for an export of a coordinator, give --coordinator HOST:PORT",
            about={"export": wanted},
        )
    if export.message is None:
        raise ServiceError(
            export.problem or f"export {wanted} is just starting",
            reason="STATE_SCHEMA" if export.problem else "EXPORT_NOT_FOUND",
            about={"folder": export.folder},
        )
    return export


def delete_local_export(settings: Settings, export_id: str) -> None:
    """Forget an export of this machine: remove its state. Its artifacts stay in the store until they are collected.

    Raises:
        ServiceError: ``EXPORT_NOT_FOUND``; ``COORDINATOR_LOCKED`` while a process runs it.
        OSError: A file of its state cannot be removed.
    """
    folder = local_export(settings, export_id).folder
    with coordinator_service().hold(folder / "state.db"):
        shutil.rmtree(folder)


@contextmanager
def succeeded_export(settings: Settings, export_id: str) -> Iterator[pb.Export | None]:
    """Yield an export that has succeeded on this machine, with its lock held; None if there is none, or if its state cannot be read.

    The lock keeps its artifacts in the store until they are delivered.

    Raises:
        ServiceError: ``COORDINATOR_LOCKED`` while another process runs the same export.
        OSError: A file of its state cannot be opened, or is not a regular file.
    """
    state = settings.exports_path / export_id / "state.db"
    if not state.is_file():
        yield None
        return
    with coordinator_service().hold(state):
        messages = [export.message for export in _read_state(state, filter="") if export.message is not None]
        yield next((each for each in messages if each.state == pb.EXPORT_STATE_SUCCEEDED), None)


def _read_state(state: Path, *, filter: str) -> list[LocalExport]:  # noqa: A002 - as above
    folder, problem = state.parent, ""
    try:
        running = is_locked(state.with_name("state.db.lock"))
        messages = coordinator_service().exports(state, filter) if filter else _messages(state, _stamp(state))
    except OSError as error:
        problem = f"{error.filename or folder} cannot be read: {error.strerror}"
    except (pydantic.ValidationError, ConfigurationError) as error:
        problem = f"written by another version of Slipway: {error}"
    except ModelExportError as error:
        problem = str(error.failure())
    if problem:
        return [LocalExport(folder.name, folder, "unreadable", problem=problem)]
    if not messages and running and not filter:
        return [LocalExport(folder.name, folder, "starting")]
    return [
        LocalExport(message.name.rpartition("/")[2], folder, _state(message, running=running), message)
        for message in messages
    ]


def _stamp(state: Path) -> tuple[tuple[int, int, int], ...]:
    """Return what differs after every change of a state: of its file, and of the one beside it to which SQLite writes first."""
    stamps = []
    for path in (state, state.with_name("state.db-wal")):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        stamps.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(stamps)


@lru_cache(maxsize=_MOST_KEPT)
def _messages(state: Path, _stamp: tuple[tuple[int, int, int], ...]) -> tuple[pb.Export, ...]:
    """Return the exports of a state, which lists read again and again; they are not to be changed."""
    return tuple(coordinator_service().exports(state, ""))


def _state(message: pb.Export, *, running: bool) -> str:
    return export_state(message.state) if running or message.state in ENDED_STATES else "interrupted"


def digests_in_use(settings: Settings) -> frozenset[str]:
    """Return the artifacts named by exports that have not ended, or whose process is still running.

    A killed export will resume with its artifacts. Artifacts that a running export has not named yet are known to the store
    (:meth:`slipway.artifacts.store.ArtifactStore.under_way`).

    Raises:
        ServiceError: ``STATE_SCHEMA`` if a state cannot be read, because the artifacts of its export are unknown then.
        OSError: A folder cannot be read.
    """
    digests: set[str] = set()
    for state in _states(settings.exports_path):
        lock = state.with_name("state.db.lock")
        try:
            named = coordinator_service().digests(state, is_locked(lock))
        except ServiceError as error:
            raise _unknown_artifacts_error(state, error.message, error.remedy) from error
        if named is None and not is_locked(lock):
            remedy = f"remove {state.parent}: no export can resume from it"
            raise _unknown_artifacts_error(
                state, f"{state} has no tables: it is damaged, or its process ended at its start", remedy
            )
        digests |= named or frozenset()
    return frozenset(digests)


def _states(folder: Path) -> list[Path]:
    """Return the state files of all exports; unlike ``glob``, fail for folders that cannot be read."""
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    return [entry / "state.db" for entry in entries if entry.is_dir() and _is_there(entry / "state.db")]


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _unknown_artifacts_error(state: Path, why: str, remedy: str) -> ServiceError:
    return ServiceError(
        f"nothing was removed, because the artifacts of an export are unknown: {why}",
        reason="STATE_SCHEMA",
        remedy=remedy,
        about={"file": state},
    )


def is_locked(path: Path) -> bool:
    """Return whether a living process holds a lock.

    Raises:
        OSError: The lock file cannot be opened, or is not a regular file.
    """
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
