"""Show the projects of a coordinator: what they use, and how much of it they may have."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict

from slipway.security.access.projects import WINDOW_DAYS
from slipway.sizes import format_size
from slipway.terminal.columns import Column, FittedTable
from slipway.terminal.console import errors, print_json, show
from slipway_protos.v1 import coordinator_pb2 as pb

_HOUR_SECONDS = 3600


def print_projects(projects: Sequence[pb.Project], *, as_json: bool) -> None:
    """Print projects with what they use."""
    if as_json:
        # With all fields, also those that are 0: programs read them. A limit that is not set is not there.
        documents = [
            MessageToDict(each, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            for each in projects
        ]
        print_json({"projects": documents})
        return
    if not projects:
        errors.print("no projects")
        return
    table = FittedTable(
        Column("project", style="bold"),
        Column("exports under way", right=True),
        Column("in the store", right=True),
        Column(f"GPU hours in {WINDOW_DAYS} days", right=True),
        Column("weight", rank=1, right=True),
        Column("highest priority", rank=2, right=True),
    )
    for each in projects:
        limits, usage = each.limits, each.usage
        exports = str(limits.unended_exports) if limits.HasField("unended_exports") else ""
        stored = format_size(limits.stored_bytes) if limits.HasField("stored_bytes") else ""
        hours = _hours(limits.gpu_seconds) if limits.HasField("gpu_seconds") else ""
        table.add_row(
            each.name.removeprefix("projects/"),
            _of(str(usage.unended_exports), exports),
            _of(format_size(usage.stored_bytes), stored),
            _of(_hours(usage.gpu_seconds), hours),
            str(limits.weight),
            str(limits.highest_priority),
        )
    show(table)
    unmeasured = sum(each.usage.unmeasured_artifacts for each in projects)
    if unmeasured:
        errors.print(f"artifacts in the store that do not count yet, because they are being measured: {unmeasured}")


def _of(used: str, most: str) -> str:
    return f"{used} of {most}" if most else used


def _hours(seconds: float) -> str:
    return f"{seconds / _HOUR_SECONDS:.1f}"
