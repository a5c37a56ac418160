"""Exports of a coordinator, shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.table import Table
from rich.text import Text

from slipway.cli.console import answers, errors, print_json
from slipway.cli.display import make_display
from slipway.cli.rows import EXPORT_STATES, Rows
from slipway.cli.table import progress_table
from slipway.client import Client
from slipway.logs import configure_logs
from slipway.wire import failure_of_status
from slipway_protos.v1 import export_pb2 as pb

_ENDED = (pb.EXPORT_STATE_SUCCEEDED, pb.EXPORT_STATE_FAILED, pb.EXPORT_STATE_CANCELLED)


def answer_export(export: pb.Export, *, as_json: bool) -> None:
    """Print one export."""
    if as_json:
        print_json(_document(export))
        return
    rows = Rows()
    rows.take(pb.ExportEvent(export=export))
    answers.print(Text(f"{export.name}  {EXPORT_STATES[export.state]}", style="bold"))
    answers.print(progress_table(rows, now=export.end_time.ToNanoseconds() / 1e9))
    if export.HasField("error"):
        failure = failure_of_status(export.error)
        answers.print(Text.assemble(("error ", "bold red"), (f"[{failure.reason}] ", "red"), str(failure)))


def answer_exports(exports: Sequence[pb.Export], *, as_json: bool) -> None:
    """Print several exports."""
    if as_json:
        print_json({"exports": [_document(export) for export in exports]})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("export", "state", "model", "created", "formats"):
        table.add_column(name, overflow="fold")
    for export in exports:
        cells = (
            export.name.rpartition("/")[2],
            EXPORT_STATES[export.state],
            export.labels.get("model_name", ""),
            export.create_time.ToDatetime().isoformat(" ", "seconds"),
            ", ".join(sorted(export.outputs)),
        )
        table.add_row(*(Text(cell) for cell in cells))
    answers.print(table)


def follow(client: Client, name: str) -> pb.Export:
    """Show an export's events until it ends; answers it."""
    configure_logs("info", console=errors)
    with make_display() as display:
        for event in client.watch_export(name):
            display.event(event)
            if event.WhichOneof("event") == "export" and event.export.state in _ENDED:
                break
    return client.get_export(name)


def exit_code_of(export: pb.Export) -> int:
    """0, or the code of an ended export's failure."""
    return 0 if export.state == pb.EXPORT_STATE_SUCCEEDED else failure_of_status(export.error).exit_code


def _document(export: pb.Export) -> dict[str, Any]:
    return MessageToDict(export, preserving_proto_field_name=True)
