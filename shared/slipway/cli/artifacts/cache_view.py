"""Show the artifact store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from slipway.cli.terminal.columns import Column, FittedTable
from slipway.cli.terminal.console import duration
from slipway.counts import counted
from slipway.sizes import format_size

_SHORT = len("sha256:") + 12


def cache_table(listing: dict[str, Any]) -> Group:
    """Show artifacts with their size and last use, and their total size."""
    short = short_digests([entry["digest"] for entry in listing["artifacts"]])
    table = FittedTable(
        Column("artifact", wrap=True),
        Column("digest"),
        Column("files", rank=3, right=True),
        Column("size", rank=1, right=True),
        Column("used", rank=2, right=True),
    )
    for entry in listing["artifacts"]:
        age = duration(max(time.time() - entry["last_used"], 0))
        name = entry["name"] if entry["complete"] else f"{entry['name']} (incomplete)"
        table.add_row(name, short[entry["digest"]], str(entry["files"]), format_size(entry["size_bytes"]), f"{age} ago")
    total = f"{counted(len(listing['artifacts']), 'artifact')}, {format_size(listing['blob_bytes'])} on disk at {listing['store']}"
    return Group(table, Text(total))


def short_digests(digests: Sequence[str]) -> dict[str, str]:
    """Shorten each digest to 12 digits, or more if needed to keep all distinct; ``slipway pull`` and ``verify`` accept them."""
    length = _SHORT
    while len({digest[:length] for digest in digests}) < len(set(digests)):
        length += 4
    return {digest: digest[:length] for digest in digests}


def gc_line(done: dict[str, Any]) -> str:
    """Say what a collection removed."""
    verb = "would remove" if done["dry_run"] else "removed"
    line = f"{verb} {counted(len(done['artifacts']), 'artifact')} and {counted(done['blobs'], 'blob')}, {format_size(done['freed_bytes'])}"
    return "\n".join([line, *(f"  left by an interrupted stage: {name}" for name in done["kept"])])
