"""Models and places for validation tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.stage import Context
from support.models.validation_models import TEXT, Models, export_onnx


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_onnx(tiny: Models) -> Path:
    return export_onnx(tiny.merged_module, tiny.root / "onnx")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    work = tmp_path / "work"
    work.mkdir()
    return Context(workdir=work)


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heldout")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder
