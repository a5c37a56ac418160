"""A project of a user who exports: a base, a run and a home."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.commands.cli import Done, slipway


@dataclass(frozen=True)
class Project:
    """A folder with a base, a run and a home; what an export may touch."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoint-10"

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def home(self) -> Path:
        return self.root / "home"

    def export(self, *more: str, **environment: str) -> Done:
        formats = ("--set", "formats.onnx.enabled=false", "--set", "validation.enabled=false")
        where = ("--base-model", str(self.base), "--checkpoint", str(self.run), "--out", str(self.out))
        return slipway("export", "--json", *where, *formats, *more, home=self.home, **environment)


def nothing_left(project: Project) -> bool:
    outputs = [] if not project.out.exists() else list(project.out.iterdir())
    scratch = project.home / "scratch"
    return outputs == [] and (not scratch.exists() or list(scratch.iterdir()) == [])
