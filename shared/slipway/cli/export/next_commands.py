"""Which commands follow one that only talks to a coordinator: how to watch an export, and how to fetch what it made."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipway.results.outcome import delivered_formats
from slipway_protos.v1 import export_pb2 as pb


def fetch_commands(export: pb.Export, connection: Sequence[str]) -> dict[str, str]:
    """One command for each format that is there, by what it does.

    Args:
        export: The export.
        connection: Options that lead to the same coordinator; empty for an export of this machine.
    """
    return {
        f"fetch {name}": shlex.join(["slipway", "pull", digest, name, *connection])
        for name, digest in delivered_formats(export).items()
    }


def submitted_commands(
    export: pb.Export,
    connection: Sequence[str],
    *,
    config: Path | None,
    given: Mapping[str, str | None],
    settings: Sequence[str],
) -> dict[str, str]:
    """How to follow an export that was just created, and how to have its results here.

    Args:
        export: The export.
        connection: Options that lead to the same coordinator.
        config: Its YAML file.
        given: Other options that were given, by flag.
        settings: What ``--set`` was given.
    """
    words = ["-c", str(config)] if config else []
    words += [word for flag, value in given.items() if value is not None for word in (flag, value)]
    words += [word for setting in settings for word in ("--set", setting)]
    name = export.name.rpartition("/")[2]
    return {
        "follow it": shlex.join(["slipway", "watch", name, *connection]),
        "fetch its results with the report, when it is done": shlex.join(["slipway", "export", *words, *connection]),
    }
