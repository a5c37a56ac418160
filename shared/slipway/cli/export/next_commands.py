"""Suggest the next commands for an export: watch it, or fetch its outputs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from slipway.results.outcome import delivered_formats
from slipway_protos.v1 import export_pb2 as pb


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
