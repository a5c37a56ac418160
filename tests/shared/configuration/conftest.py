"""The file that tests of configurations start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands.configurations import CANONICAL


@pytest.fixture
def canonical(tmp_path: Path) -> Path:
    path = tmp_path / "project" / "export.yaml"
    path.parent.mkdir()
    path.write_text(CANONICAL)
    return path
