"""The results of a batch: a sequence with an entry for each export, and the table that is written beside the outputs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from slipway.errors import ArtifactError, Failure, ModelExportError
from slipway.exporting.batches.subjects import LeftOut
from slipway.files.json_documents import read_json
from slipway.files.work_folders import unfinished
from slipway.representation import html_table, named_few, preformatted, three_lines
from slipway.results.result import ExportResult
from slipway.sizes import format_size
from slipway.texts import counted, escaped_json, redact

TABLE = "batch.json"
"""Name of the table beside the outputs."""

_SCHEMA = "slipway.batch/1"
_SECONDS = "{:.1f} s"


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One export of a batch.

    Attributes:
        name: Name of the run's folder.
        run: Place of the run, the adapter or the model.
        result: The result, which may be a failed one; None if there is none.
        error: Why there is no result; None if there is one.
        seconds: How long it took in this batch; None if it was refused before anything ran.
    """

    name: str
    run: str
    result: ExportResult | None
    error: ModelExportError | None = None
    seconds: float | None = None

    @property
    def success(self) -> bool:
        """Whether it has every output, and none failed validation."""
        return self.result is not None and self.result.success

    @property
    def state(self) -> str:
        """``succeeded``, ``failed``, or ``impossible`` if it was refused before anything ran."""
        if self.success:
            return "succeeded"
        return "impossible" if self.seconds is None else "failed"

    def failure(self) -> Failure | None:
        """Return why it failed; None if it succeeded."""
        if self.error is not None:
            return self.error.failure()
        if self.result is None or self.result.success:
            return None
        return Failure(self.result.reason, self.result.error_message or "the export failed")

    def require(self) -> ExportResult:
        """Return the result if the export succeeded.

        Raises:
            ModelExportError: :attr:`error`, or what :meth:`ExportResult.require` raises.
        """
        if self.result is None:
            raise self.error or ModelExportError("there is no result")
        return self.result.require()

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON-ready data; the attempts are in the report of the export."""
        failure = self.failure()
        return {
            "name": self.name,
            "run": self.run,
            "state": self.state,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "exit_code": failure.exit_code if failure else 0,
            "reason": failure.reason if failure else "",
            "error_message": str(failure) if failure else "",
            "result": self.result.model_dump(mode="json", exclude={"attempts"}) if self.result else None,
        }


@dataclass(frozen=True, repr=False)
class BatchResult(Sequence[BatchEntry]):
    """The results of several exports, in the order of the runs: a sequence of entries.

    Attributes:
        entries: An entry for each export.
        left_out: Entries of the folder that were not exported.
        table: Path of the table that was written beside the outputs; empty if none was.
        warnings: Warnings about the batch itself.
    """

    entries: tuple[BatchEntry, ...]
    left_out: tuple[LeftOut, ...] = ()
    table: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def success(self) -> bool:
        """Whether every export succeeded."""
        return not self.failed

    @property
    def failed(self) -> tuple[BatchEntry, ...]:
        """The exports that did not succeed."""
        return tuple(entry for entry in self.entries if not entry.success)

    @property
    def exit_code(self) -> int:
        """The exit code of the failure that decides, in the order of a single export; 0 without any."""
        deciding = self._deciding()
        return 0 if deciding is None else deciding.exit_code

    def require(self) -> BatchResult:
        """Return this result if every export succeeded.

        Raises:
            ModelExportError: The failure that decides, with the name of its export.
        """
        deciding = self._deciding()
        if deciding is not None:
            name = next(entry.name for entry in self.failed if entry.failure() == deciding)
            others = f" ({len(self.failed)} of {counted(len(self), 'export')} failed)"
            message = f"{name}{others}: {deciding.message}"
            raise Failure(
                deciding.reason, message, deciding.remedy, deciding.error_type, deciding.about, deciding.retryable
            ).error()
        return self

    def _deciding(self) -> Failure | None:
        return Failure.deciding(failure for entry in self.entries if (failure := entry.failure()) is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON-ready data, as ``slipway export --each FOLDER --json`` prints it."""
        return {
            "schema": _SCHEMA,
            "success": self.success,
            "exit_code": self.exit_code,
            "exports": [entry.to_json() for entry in self.entries],
            "left_out": [{"name": each.name, "why": each.why} for each in self.left_out],
            "table": self.table,
            "warnings": list(self.warnings),
        }

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[BatchEntry]:
        return iter(self.entries)

    @overload
    def __getitem__(self, index: int) -> BatchEntry: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[BatchEntry, ...]: ...

    def __getitem__(self, index: int | slice) -> BatchEntry | tuple[BatchEntry, ...]:
        return self.entries[index]

    def __repr__(self) -> str:
        done = len(self) - len(self.failed)
        failed = [f"{entry.name} {entry.to_json()['reason']}" for entry in self.failed]
        return three_lines(
            f"BatchResult: {done} of {counted(len(self), 'export')} succeeded"
            + (f", {len(self.left_out)} left out" if self.left_out else ""),
            f"failed: {named_few(failed)}" if failed else named_few([entry.name for entry in self]),
            self.table or "nothing was delivered",
        )

    def _repr_html_(self) -> str:
        return preformatted(repr(self)) + html_table(HEADINGS, rows(self))


HEADINGS = ("export", "state", "output", "verdict", "size", "KL", "seconds")


def rows(batch: BatchResult) -> Iterator[tuple[str, ...]]:
    """Yield a row for each output, or for an export without any, as texts for :data:`HEADINGS`."""
    for entry in batch:
        seconds = "–" if entry.seconds is None else _SECONDS.format(entry.seconds)
        failure = entry.failure()
        state = f"{entry.state} [{failure.reason}]" if failure else entry.state
        made = list(_outputs(entry.result)) if entry.result else []
        for output in made or [("–", "–", "–", "–")]:
            yield (entry.name, state, *output, seconds)


def _outputs(result: ExportResult) -> Iterator[tuple[str, str, str, str]]:
    for name, made in result.formats.items():
        distance = made.mean_kl if made.mean_kl is not None else made.relative_error
        unit = "" if made.mean_kl is not None else " relative error"
        figure = "–" if distance is None else f"{distance:.1e}{unit}"
        yield name, made.status.replace("_", " "), format_size(made.size_bytes), figure
    for name, failed in result.failed.items():
        yield name, failed.state.replace("_", " "), "–", "–"


def check_table(folder: Path) -> None:
    """Check that the table may be written into a folder: what has its name there is a table of an earlier batch.

    Raises:
        ArtifactError: ``OUTPUT_EXISTS``.
    """
    path = folder / TABLE
    if not os.path.lexists(path):
        return
    try:
        document = None if path.is_symlink() else read_json(path)
    except (OSError, ValueError):
        document = None
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        raise ArtifactError(
            f"{path} is not the table of a batch",
            reason="OUTPUT_EXISTS",
            remedy="choose another output.directory, or move the file away",
            about={"file": path},
        )


def write_table(batch: BatchResult, folder: Path) -> None:
    """Write the table into a folder: it is whole or, after a fault, the one before.

    Raises:
        OSError: It cannot be written.
    """
    text = json.dumps(batch.to_json(), indent=2, allow_nan=False)
    target = folder / TABLE
    with unfinished(target) as work:
        (work / TABLE).write_text(escaped_json(redact(text)) + "\n", encoding="utf-8")
        (work / TABLE).replace(target)
