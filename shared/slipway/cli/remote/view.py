"""Print exports of a coordinator or of this machine, and suggest the next commands for one: watch it, or fetch its outputs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict
from rich.text import Text

from slipway.client import Client
from slipway.export_sources.naming import title
from slipway.progress.display import open_display
from slipway.progress.observer import ProgressForm
from slipway.progress.rendering import progress_table
from slipway.progress.rows import Rows
from slipway.results.outcome import delivered_formats, recorded_failure
from slipway.rpc.values import ENDED_STATES, export_state
from slipway.terminal.columns import Column, FittedTable, Prose
from slipway.terminal.console import errors, print_json, show, unbroken_line
from slipway_protos.v1 import export_pb2 as pb

if TYPE_CHECKING:
    from slipway.embedded.local_exports import LocalExport


def print_export(
    export: pb.Export, *, as_json: bool, state: str = "", commands: Mapping[str, str] | None = None
) -> None:
    """Print one export, with suggestions for the next commands.

    Args:
        export: The export.
        as_json: Print one JSON document.
        state: Its state, if more is known than the message says.
        commands: Next commands by purpose.
    """
    if as_json:
        print_json(_document(export) | ({"commands": dict(commands)} if commands else {}))
        return
    rows = Rows()
    rows.take(pb.ExportEvent(export=export))
    what = title(export.labels)
    by = f", by {export.creator}" if export.creator else ""
    show(
        *([Text(what, style="bold")] if what else []),
        unbroken_line(export.name, f"  {state or export_state(export.state)}{by}"),
        progress_table(rows, now=export.end_time.ToNanoseconds() / 1e9 if export.HasField("end_time") else time.time()),
    )
    failure = recorded_failure(export)
    if failure is not None and failure.reason != "CANCELLED":  # its state, above, says so
        show(Prose("error ", "bold red", Text.assemble((f"[{failure.reason}] ", "red"), str(failure))))
    print_commands(commands or {})


def deletion_line(deleted: str, kept: Sequence[str]) -> str:
    """Return what to print of a deletion; ``kept`` are exports for which an artifact stays."""
    stays = f"; it stays until these exports are deleted, too: {', '.join(kept)}" if kept else ""
    return f"deleted {deleted}{stays}"


def print_commands(commands: Mapping[str, str]) -> None:
    """Print commands on standard error, each on one line, so that it can be copied."""
    for purpose, command in commands.items():
        errors.print(Text(f"{purpose}:", style="dim"))
        errors.print(unbroken_line("  ", command), soft_wrap=True)


def print_exports(exports: Sequence[pb.Export], *, as_json: bool) -> None:
    """Print several exports of a coordinator."""
    if as_json:
        print_json({"exports": [_document(export) for export in exports]})
        return
    _table([(export.name.rpartition("/")[2], export_state(export.state), export) for export in exports])


def print_local_exports(exports: Sequence[LocalExport], *, as_json: bool) -> None:
    """Print the exports of this machine; for an unreadable one, print the reason."""
    if as_json:
        print_json({"exports": [_local_document(export) for export in exports]})
        return
    _table([(export.id, export.state, export.message) for export in exports])
    problems = [export for export in exports if export.problem]
    show(*(Prose("unreadable ", "yellow", f"{export.id}: {export.problem}") for export in problems))


def _table(exports: Sequence[tuple[str, str, pb.Export | None]]) -> None:
    creators = any(export is not None and export.creator for _, _, export in exports)
    table = FittedTable(
        Column("export"),
        Column("state"),
        Column("of", rank=1, wrap=True),
        Column("created (UTC)", rank=2),
        Column("formats", rank=3, wrap=True),
        *([Column("by", rank=4)] if creators else []),
    )
    for name, state, export in exports:
        if export is None:
            table.add_row(name, state, "", "", "", *([""] if creators else []))
            continue
        created = export.create_time.ToDatetime().isoformat(" ", "seconds")
        formats = ", ".join(sorted(name for name in export.outputs if name != "validation"))
        table.add_row(name, state, title(export.labels), created, formats, *([export.creator] if creators else []))
    if table.row_count:
        show(table)
    else:
        errors.print("no exports")


def follow(client: Client, name: str, *, progress: ProgressForm, level: str) -> pb.Export:
    """Show an export's events until it ends, and return the export. The live table disappears, because the caller prints the same."""
    with open_display(progress, level=level, transient=True) as display:
        display.title(title(client.get_export(name).labels) or name)
        for event in client.watch_export(name):
            display.event(event)
            if event.WhichOneof("event") == "export" and event.export.state in ENDED_STATES:
                break
    return client.get_export(name)


def exit_code_of(export: pb.Export) -> int:
    """Return 0, or the exit code of an ended export's failure; a failed validation is a failure, as for ``slipway export``."""
    failure = recorded_failure(export)
    return 0 if failure is None else failure.exit_code


def _document(export: pb.Export) -> dict[str, Any]:
    return MessageToDict(export, preserving_proto_field_name=True)


def _local_document(export: LocalExport) -> dict[str, Any]:
    message = _document(export.message) if export.message else {"name": export.id}
    more = {"folder": str(export.folder), "local_state": export.state}
    return message | more | ({"problem": export.problem} if export.problem else {})


def fetch_commands(export: pb.Export, connection: Sequence[str]) -> dict[str, str]:
    """Return a command to fetch each available format, by its purpose.

    Args:
        export: The export.
        connection: Options for the same coordinator; empty for an export of this machine.
    """
    return {
        f"fetch {name}": shlex.join(["slipway", "pull", digest, name, *connection])
        for name, digest in delivered_formats(export).items()
    }


def submitted_commands(
    export: pb.Export,
    connection: Sequence[str],
    *,
    run: str | None,
    config: Path | None,
    given: Sequence[tuple[str, str | None]],
) -> dict[str, str]:
    """Return commands to follow a new export and to fetch its results, by their purpose.

    Args:
        export: The export.
        connection: Options for the same coordinator.
        run: Its run, if that was an argument.
        config: Its YAML file.
        given: Other options, each with its flag; None if not given.
    """
    words = [run] if run else []
    words += ["-c", str(config)] if config else []
    words += [word for flag, value in given if value is not None for word in (flag, value)]
    name = export.name.rpartition("/")[2]
    return {
        "follow it": shlex.join(["slipway", "watch", name, *connection]),
        "fetch its results with the report, when it is done": shlex.join(["slipway", "export", *words, *connection]),
    }
