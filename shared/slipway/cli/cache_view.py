"""The artifact store, shown."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from slipway.cli.console import duration, size
from slipway.counts import counted


def cache_table(listing: dict[str, Any]) -> Group:
    """Artifacts with their size and last use, and what they take together."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("artifact", no_wrap=True)
    table.add_column("made by")
    for name in ("files", "size", "used"):
        table.add_column(name, justify="right")
    for entry in listing["artifacts"]:
        age = duration(max(time.time() - entry["last_used"], 0))
        table.add_row(
            entry["digest"], ", ".join(entry["made_by"]), str(entry["files"]), size(entry["size_bytes"]), f"{age} ago"
        )
    total = (
        f"{counted(len(listing['artifacts']), 'artifact')}, {size(listing['blob_bytes'])} on disk at {listing['store']}"
    )
    return Group(table, Text(total))


def gc_line(done: dict[str, Any]) -> str:
    """What a collection did, in a sentence."""
    verb = "would remove" if done["dry_run"] else "removed"
    line = f"{verb} {counted(len(done['artifacts']), 'artifact')} and {counted(done['blobs'], 'blob')}, {size(done['freed_bytes'])}"
    return "\n".join([line, *(f"  left by an interrupted stage: {name}" for name in done["kept"])])
