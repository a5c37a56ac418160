"""What the console needs of the place whose exports it shows: this machine, or a coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from slipway.advice.offers import Offer
from slipway.artifacts import Artifacts, ManifestFile
from slipway.console.questions import Questions
from slipway.console.wish import Wish
from slipway.errors import Failure
from slipway.export_sources.naming import title
from slipway.progress.tracking import ExportProgress, Tracked
from slipway.results.outcome import delivered_formats, export_id, recorded_failure
from slipway.rpc.values import ENDED_STATES, export_state
from slipway_protos.v1 import export_pb2 as pb

CANCEL, RETRY, DELETE = "cancel", "retry", "delete"
"""What can be done with an export, beside looking at it. A retry of an interrupted one goes on where it was."""
STATES_AT_END = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the list.

    Attributes:
        project: Its project.
        id: Last part of its name.
        title: What is exported, for people; empty while unknown.
        state: Its state.
        outputs: Names of what it has delivered.
        creator: Who created it; empty if unknown.
        created: When; None while unknown.
        seconds: How long it took, or has taken so far; None while unknown.
        problem: Why it cannot be shown; empty if it can.
    """

    project: str
    id: str
    title: str
    state: str
    outputs: Sequence[str] = ()
    creator: str = ""
    created: datetime | None = None
    seconds: float | None = None
    problem: str = ""

    @classmethod
    def of(cls, message: pb.Export, *, state: str = "") -> Entry:
        """Return the line of a coordinator's record."""
        created = message.create_time.ToDatetime(UTC)
        ended = message.end_time.ToDatetime(UTC) if message.HasField("end_time") else None
        running = ended is None and not state
        until = ended or (datetime.now(UTC) if running else None)
        return cls(
            project=message.name.split("/")[1],
            id=export_id(message),
            title=title(message.labels),
            state=state or export_state(message.state),
            outputs=tuple(delivered_formats(message)),
            creator=message.creator,
            created=created,
            seconds=(until - created).total_seconds() if until else None,
        )


@dataclass(frozen=True, slots=True)
class Listing:
    """A page of the list; ``next`` is the cursor of the page after it, empty for the last."""

    entries: tuple[Entry, ...]
    next: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """One export.

    Attributes:
        entry: Its line in the list.
        progress: How far it is.
        message: The coordinator's record; None before there is one.
        failure: Why it failed; None if it did not.
        may: What can be done with it.
        folder: Where its outputs were delivered; empty if nowhere, or if that is not known.
    """

    entry: Entry
    progress: ExportProgress
    message: pb.Export | None = None
    failure: Failure | None = None
    may: frozenset[str] = frozenset()
    folder: str = ""

    @property
    def is_ended(self) -> bool:
        """Whether it will not change by itself."""
        return self.entry.state in {*STATES_AT_END, "interrupted"}

    @property
    def has_report(self) -> bool:
        """Whether there is a report of it."""
        return self.message is not None and self.message.state in ENDED_STATES and self.is_ended


@dataclass(frozen=True, slots=True)
class Planned:
    """What an export would do.

    Attributes:
        title: What would be exported; empty if that is not known before.
        outputs: What it would deliver, each with an upper estimate of its size in bytes, 0 if unknown.
        seconds: About how long it takes; 0 if unknown.
        bytes: What it needs on the disk; 0 if unknown.
        warnings: Warnings.
        failure: What makes it impossible; None if nothing does.
    """

    title: str
    outputs: Mapping[str, int]
    seconds: float = 0.0
    bytes: int = 0
    warnings: Sequence[str] = ()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts.

    Attributes:
        caption: What is in it.
        headings: A heading for each column; none for a list of names and values.
        rows: Its rows.
        otherwise: What is said where there is no row.
    """

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    otherwise: str = ""


@dataclass(frozen=True, slots=True)
class Machines:
    """Where work is done, as tables."""

    tables: Sequence[Table]


class Place(Protocol):
    """A place of exports, as one caller may see it. Every method may be called from several threads, and raises ModelExportError."""

    @property
    def name(self) -> str:
        """Name of the place, for people."""
        ...

    @property
    def is_here(self) -> bool:
        """Whether the place is this machine, so that paths are those of this machine."""
        ...

    @property
    def options(self) -> Sequence[str]:
        """Words of a command line for the same place."""
        ...

    @property
    def project(self) -> str:
        """Project of new exports; empty where none is chosen."""
        ...

    @property
    def questions(self) -> Questions | None:
        """What puts prompts to models; None for a place whose models cannot be run from here."""
        ...

    def listed(self, cursor: str = "", *, filter: str = "") -> Listing:  # noqa: A002 - the field's name everywhere
        """Return a page of the list, newest first, of the exports that match a filter as in AIP-160."""
        ...

    def shown(self, project: str, export: str) -> Shown:
        """Return one export."""
        ...

    def offered(self, wish: Wish) -> Sequence[Offer]:
        """Return the outputs to choose from, with sizes for the model of a wish where that is known."""
        ...

    def planned(self, wish: Wish) -> Planned:
        """Return what an export would do."""
        ...

    def start(self, wish: Wish) -> tuple[str, str]:
        """Begin an export; return its project and id."""
        ...

    def act(self, project: str, export: str, action: str) -> None:
        """Cancel, retry or delete an export."""
        ...

    def artifacts(self, project: str) -> AbstractContextManager[Artifacts]:
        """Return the artifacts of a project."""
        ...

    def content(self, project: str, artifact: str, file: ManifestFile, *, offset: int = 0) -> Iterator[bytes]:
        """Yield the content of a file of an artifact."""
        ...

    def machines(self) -> Machines:
        """Return what is known of the machines that do the work."""
        ...


def shown_message(message: pb.Export, *, state: str = "", may: frozenset[str] | None = None) -> Shown:
    """Return an export as its record alone shows it.

    Args:
        message: The record.
        state: Its state, if more is known than the record says.
        may: What can be done with it; None for what its state allows at a coordinator.
    """
    tracked = Tracked(resuming=False)
    tracked.event(pb.ExportEvent(export=message))
    return Shown(
        Entry.of(message, state=state),
        tracked.progress(),
        message,
        recorded_failure(message),
        allowed(message) if may is None else may,
    )


def allowed(message: pb.Export) -> frozenset[str]:
    """Return what a coordinator can do with an export in its state."""
    if message.state not in ENDED_STATES:
        return frozenset({CANCEL})
    return frozenset({DELETE}) if message.state == pb.EXPORT_STATE_SUCCEEDED else frozenset({RETRY, DELETE})
