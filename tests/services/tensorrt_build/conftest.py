"""A decoder in the form TensorRT parses, and the stage run in a work folder of its own."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_tensorrt_build.params import TensorRTBuildParams
from slipway_tensorrt_build.stage import STAGE
from support.models.quantize_models import save_tiny


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3 of standard operators, opset 20, float32."""
    folder = tmp_path_factory.mktemp("decoder")
    params = OnnxExportParams(runtime="tensorrt", parity="never")
    exported = EXPORT.run({"pytorch": save_tiny(folder / "source")}, params, Context(workdir=folder))["onnx"]
    (exported / "tokenizer.json").write_text('{"version": "1.0"}')
    (exported / "additional_chat_templates").mkdir()
    (exported / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return exported


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., tuple[Path, Context]]:
    def call(source: Path, **params: Any) -> tuple[Path, Context]:
        gc.collect()  # TensorRT warns while an earlier builder is there, and each test has a log of its own
        ctx = Context(workdir=tmp_path, log=logging.getLogger("test"))
        return STAGE.run({"onnx": source}, TensorRTBuildParams(**params), ctx)["tensorrt"], ctx

    return call
