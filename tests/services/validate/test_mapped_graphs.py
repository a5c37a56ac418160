"""Graphs of float32 weights are run from their file; quantized ones are packed as their kernels need it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from slipway.proof.runtime import plain_step
from slipway_validate.runner.onnx_graphs.load import load


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "content", "mapped"),
    [
        ("onnx_export.json", {"precision": "float32"}, True),
        ("quantization.json", {"level": "int4"}, False),
    ],
)
def test_the_engine_says_whether_weights_are_mapped(
    tiny_onnx: Path, tmp_path: Path, file: str, content: dict[str, str], mapped: bool
) -> None:
    folder = shutil.copytree(tiny_onnx, tmp_path / "onnx")
    (folder / file).write_text(json.dumps(content))
    model = load(folder, threads=1)
    assert model.engine.version.endswith(", weights mapped") == mapped
    step = plain_step([3, 5, 7], past=None, past_length=0)
    assert np.allclose(model.forward(step)[0], load(tiny_onnx, threads=1).forward(step)[0], atol=1e-5)
