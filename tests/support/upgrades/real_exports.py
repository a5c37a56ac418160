"""Exports of a small real model by the command of any version, with real stages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.harness.described_reports import of_another_version
from support.upgrades.versions import THIS, Version

_SETTINGS = (
    "formats.onnx.enabled=false",
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


def words(project: Path, out: Path, *more: str, level: str = "int8") -> list[str | Path]:
    """Return the arguments of the export of a folder with ``base`` and ``run``; with a level, PyTorch is quantized, too."""
    where = ["--base-model", project / "base", "--checkpoint", project / "run", "--out", out]
    settings = [*_SETTINGS, f"formats.pytorch.quantization={level}"]
    return ["export", "--json", *where, *(word for setting in settings for word in ("--set", setting)), *more]


def export(version: Version, project: Path, out: Path, *more: str, home: Path, level: str = "int8") -> Made:
    """Export to the end; the random model may keep too little of its fine-tune, which is no fault here."""
    if version is not THIS:
        of_another_version.add(out)
    done = version.run(*words(project, out, *more, level=level), home=home)
    assert done.code in {0, 4}, f"{version.name}: {done.err[-4000:]}"
    result = json.loads(done.out)
    assert set(result["formats"]) == {"pytorch"} | ({f"pytorch-{level}"} if level != "none" else set()), done.err
    return Made(result, Path(result["output_directory"]))
