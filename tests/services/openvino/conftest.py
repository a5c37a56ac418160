"""Small models as ONNX graphs, and the stage run on them in a folder of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openvino", reason="openvino is not installed")

from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_openvino.params import OpenVinoParams
from slipway_openvino.stage import STAGE
from support.models.quantize_models import save_tiny
from support.models.tiny_models import save_tokenizer


def exported(source: Path, work: Path, **params: Any) -> Path:
    """Return the folder with the graph that the format asks for."""
    asked = OnnxExportParams(optimization="basic", **{"parity": "never", **params})
    work.mkdir(parents=True, exist_ok=True)
    return EXPORT.run({"pytorch": source}, asked, Context(workdir=work))["onnx"]


def converted(source: Path, work: Path, **params: Any) -> tuple[Path, Context]:
    """Run the stage on the folder of a graph."""
    work.mkdir(parents=True, exist_ok=True)
    ctx = Context(workdir=work, log=logging.getLogger("test"))
    return STAGE.run({"onnx": source}, OpenVinoParams(**params), ctx)["openvino"], ctx


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
    """The model as the stage delivers it."""
    return converted(graph, pytorch.parent / "converted")[0]


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., tuple[Path, Context]]:
    def call(source: Path, **params: Any) -> tuple[Path, Context]:
        return converted(source, tmp_path / "work", **params)

    return call
