"""TensorRT's engines, built on the GPU: in their proof, and beside PyTorch."""

from __future__ import annotations

import pytest

from slipway.machine.processors import Gpu
from support.gpu.decoding import TorchModel

from .conftest import Add, Measure, Model

LEVELS = {"tensorrt": 1e-4, "tensorrt-fp16": 1e-3, "tensorrt-int8_static": 0.05}
"""Largest mean KL divergence from PyTorch in float32, nats. Engines multiply float32 in TF32."""


@pytest.fixture
def library() -> None:
    """TensorRT itself."""
    pytest.importorskip("tensorrt", reason="not run: tensorrt is not installed")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", LEVELS)
def test_an_engine_runs_in_its_proof_and_passes(model: Model, gpu: Gpu, name: str, figures: Add) -> None:
    [found] = [output for output in model.report["validation"]["outputs"] if output["name"] == name]
    figures(model=model.name, what=f"proof of {name}", kl=(found["to_reference"] or {}).get("mean_kl", ""))
    assert found["status"] == "passed", (found["status_reason"], found["explanation"], found["remedy"])
    assert found["engine"]["provider"] == gpu.name


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", LEVELS)
def test_an_engine_says_what_pytorch_says(model: Model, name: str, measure: Measure) -> None:
    from slipway_validate.runner.runtime_tensorrt import load

    agreed = measure(model, name, lambda: load(model.folder(name), threads=1))
    assert agreed["kl"] < LEVELS[name]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pytorch_beside_them(model: Model, dtype: str, measure: Measure) -> None:
    agreed = measure(model, f"PyTorch {dtype}", lambda: TorchModel(model.folder("pytorch"), dtype=dtype))
    assert agreed["kl"] < 0.01
