"""A model folder per family, and a short way to run the stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE
from support.commands.transformers_js import transformers_js
from support.models.onnx_models import Exported, save_model


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's model; treat it as read-only."""
    root = tmp_path_factory.mktemp("families")

    def folder(name: str) -> Path:
        path = root / name
        return path if path.is_dir() else save_model(name, path)

    return folder


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Exported]:
    """Run the stage on a folder with the given parameters."""

    def run(source: Path, **params: Any) -> Exported:
        workdir = tmp_path / f"work-{len(list(tmp_path.iterdir()))}"
        workdir.mkdir()
        context = Context(workdir=workdir)
        outputs = STAGE.run({"pytorch": source}, OnnxExportParams(**params), context)
        return Exported(outputs["onnx"], context.facts)

    return run


@pytest.fixture(scope="module")
def decoder(family: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A decoder with packages for onnxruntime-genai and transformers.js."""
    context = Context(workdir=tmp_path_factory.mktemp("packaged"))
    params = OnnxExportParams(packaging=("genai", "transformers_js"))
    return Exported(STAGE.run({"pytorch": family("qwen3-tied")}, params, context)["onnx"], context.facts)


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with transformers.js."""
    with transformers_js(tmp_path_factory.mktemp("npm")) as folder:
        yield folder
