"""Exports of a small real model by the command of any version, with real stages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.upgrades.versions import Version

_SETTINGS = (
    "formats.onnx.enabled=false",
    "formats.pytorch.quantization=int8",
    "validation.test_samples=2",
    "validation.benchmark_performance=false",
)
STAGES = "prepare,merge,quantize,reference,validate"
"""Stages that such an export may need; an earlier version has the libraries of them all."""


@dataclass(frozen=True)
class Made:
    """A delivered export.

    Attributes:
        result: What ``slipway export --json`` printed.
        folder: Where it was delivered.
    """

    result: dict[str, Any]
    folder: Path

    @property
    def export(self) -> str:
        return str(self.result["export_id"])

    @property
    def digests(self) -> dict[str, str]:
        """Artifacts of the formats, by format."""
        return {name: entry["digest"] for name, entry in self.result["formats"].items()}

    @property
    def attempts(self) -> dict[str, dict[str, Any]]:
        """The attempts that succeeded, by task."""
        return {each["task"]: each for each in self.result["attempts"] if each["outcome"] == "succeeded"}


def words(project: Path, out: Path, *more: str) -> list[str | Path]:
    """Return the arguments of the export of a folder with ``base`` and ``run``."""
    where = ["--base-model", project / "base", "--checkpoint", project / "run", "--out", out]
    settings = [word for setting in _SETTINGS for word in ("--set", setting)]
    return ["export", "--json", *where, *settings, *more]


def export(version: Version, project: Path, out: Path, *more: str, home: Path, **environment: str) -> Made:
    """Export to the end; the random model may keep too little of its fine-tune, which is no fault here."""
    done = version.run(*words(project, out, *more), home=home, **environment)
    assert done.code in {0, 4}, f"{version.name}: {done.err[-4000:]}"
    result = json.loads(done.out)
    assert set(result["formats"]) == {"pytorch", "pytorch-int8"}, done.err[-4000:]
    return Made(result, Path(result["output_directory"]))
