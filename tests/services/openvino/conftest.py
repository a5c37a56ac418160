"""A small decoder as the stage delivers it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("slipway_openvino.library", reason="openvino is not installed", exc_type=ImportError)

from support.models.openvino_models import converted, exported
from support.models.quantize_models import save_tiny
from support.models.tiny_models import save_tokenizer


@pytest.fixture(scope="session")
def pytorch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3 with a tokenizer."""
    folder = save_tiny(tmp_path_factory.mktemp("openvino") / "pytorch")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def graph(pytorch: Path) -> Path:
    return exported(pytorch, pytorch.parent / "export")


@pytest.fixture(scope="session")
def folder(graph: Path, pytorch: Path) -> Path:
    return converted(graph, pytorch.parent / "converted", tokenizer=False)[0]
