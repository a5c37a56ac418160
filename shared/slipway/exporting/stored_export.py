"""Deliver an export of this machine or of a coordinator from its store once more, into a folder that is removed afterwards."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from slipway.artifacts import Artifacts
from slipway.distribution import require
from slipway.errors import ServiceError
from slipway.exporting.opening import artifacts_at
from slipway.files.work_folders import unfinished
from slipway.results.delivery import deliver, lineage
from slipway.results.outcome import export_id, export_result
from slipway.results.report import main_file, write_report
from slipway.results.stored import stored_validation
from slipway.rpc.values import export_state
from slipway.settings import Settings
from slipway.texts import quoted
from slipway_protos.v1 import export_pb2 as pb

_ID = r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"(?:projects/{_ID}/exports/)?{_ID}")


def is_export_name(text: str) -> bool:
    """Return whether a text has the form of an export's name or id."""
    return _NAME.fullmatch(text) is not None


@contextlib.contextmanager
def delivered_export(name: str, settings: Settings, *, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield a folder to which an export was delivered as ``slipway export`` does; it is removed at the end.

    Its report names no output directory, so the same export always gives the same files.

    Args:
        name: Name or id of an export that succeeded: of the coordinator of the settings, or of this machine without one.
        settings: Settings of this machine.
        check: Called between the pieces of the files; it may raise.

    Raises:
        ServiceError: ``EXPORT_NOT_FOUND``; ``EXPORT_STATE`` if it has not succeeded; ``COORDINATOR_LOCKED`` while it runs here.
        ArtifactError: ``ARTIFACT_NOT_FOUND`` if its artifacts were removed from the store, ``ARTIFACT_CORRUPT``, ``DISK_FULL``.
    """
    opened = _remote_export if settings.coordinator else _local_export
    with (
        opened(name, settings) as export,
        artifacts_at(settings.coordinator, settings) as store,
        unfinished(settings.scratch / f"delivered-{export_id(export)}") as work,
    ):
        _deliver(export, work / export_id(export), store, check)
        yield work / export_id(export)


def _deliver(export: pb.Export, target: Path, store: Artifacts, check: Callable[[], None]) -> None:
    validation = stored_validation(export, store)
    _, missing = main_file()
    result = export_result(export, store=store, validation=validation, warnings=missing)

    def describe(folder: Path) -> None:
        write_report(folder, result=result, validation=validation, lineage=lineage(export))

    deliver(export, target, store=store, describe=describe, on_bytes=lambda _: check())


@contextlib.contextmanager
def _remote_export(name: str, settings: Settings) -> Iterator[pb.Export]:
    from slipway.client import Client

    with Client(settings.coordinator, security=settings.security, project=settings.project) as client:
        export = client.get_export(name)
    if export.state != pb.EXPORT_STATE_SUCCEEDED:
        raise _state_error(name, export_state(export.state))
    yield export


@contextlib.contextmanager
def _local_export(name: str, settings: Settings) -> Iterator[pb.Export]:
    """Yield an export of this machine with its lock held, so that its artifacts stay in the store."""
    require("coordinator", what="reading the exports of this machine", otherwise="name one: --coordinator HOST:PORT")
    from slipway.embedded.local_exports import local_export, succeeded_export

    with succeeded_export(settings, name.rpartition("/")[2]) as export:
        if export is None:
            raise _state_error(name, local_export(settings, name).state)
        yield export


def _state_error(name: str, state: str) -> ServiceError:
    return ServiceError(
        f"export {quoted(name)} is {state.replace('_', ' ')}, and only one that succeeded can be published",
        reason="EXPORT_STATE",
        remedy="wait until it has succeeded; the folder of one that failed can be published by itself, if no output failed validation",
        about={"export": name},
    )
