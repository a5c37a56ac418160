"""Models to quantize, and the stage run in a work folder of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE
from support.models.quantize_models import save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_onnx(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("tiny-onnx")
    return EXPORT.run({"pytorch": tiny}, OnnxExportParams(parity="never"), Context(workdir=workdir))["onnx"]


@pytest.fixture
def quantize(tmp_path: Path) -> Callable[..., tuple[Path, Context]]:
    """Runs the stage in a work folder of its own."""
    runs = iter(range(100))

    def call(source: Path, *, threads: int = 1, **params: Any) -> tuple[Path, Context]:
        workdir = tmp_path / f"attempt-{next(runs)}"
        workdir.mkdir()
        ctx = Context(workdir=workdir, log=logging.getLogger("test"), threads=threads)
        return STAGE.run({"model": source}, QuantizeParams(**params), ctx)["model"], ctx

    return call
