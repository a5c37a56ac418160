"""Exports by the command of a small model that is merged and rounded in parts, and what must be equal to one in one piece."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from support.commands.cli import Done
from support.models import tiny_models

SHARDS = {"execution.shard_bytes": "1048576"}
PARTS = SHARDS | {"execution.split_bytes": "1500000"}
"""Three parts of the merge, and two of the rounding to 16 bits."""
_PLAIN = {"validation.enabled": "false", "formats.onnx.enabled": "false", "formats.pytorch.quantization": "bf16"}


def make_project(root: Path) -> Path:
    """Make a base of 4 MB with a checkpoint."""
    tiny_models.make_base(root / "base", hidden=256)
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


def words(project: Path, name: str, *more: str, **settings: str) -> list[str | Path]:
    """Return the command's words for an export that is delivered into ``out-{name}``."""
    where = ["--base-model", project / "base", "--checkpoint", project / "run", "--out", project / f"out-{name}"]
    sets = [word for key, value in (_PLAIN | settings).items() for word in ("--set", f"{key}={value}")]
    return ["export", "--json", *more, *where, *sets]


def printed(done: Done) -> Any:
    """Return what a command printed that succeeded."""
    assert done.code == 0, done.err[-3000:]
    return done.json


def delivered(result: Any) -> dict[str, dict[str, bytes]]:
    """Return the content of every file of each output."""
    return {
        name: {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        for name, folder in result["paths"].items()
    }


def attempts(result: Any) -> Counter[str]:
    """Return how many attempts each task had."""
    return Counter(attempt["task"] for attempt in result["attempts"])
