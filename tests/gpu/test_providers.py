"""ONNX Runtime's providers for NVIDIA GPUs: CUDA, as Slipway opens it, and TensorRT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.files.json_documents import read_json_object
from slipway.proof.numerics import Logits
from slipway.proof.runtime import PAST_PREFIX, PRESENT_PREFIX, Bounds, LanguageModel, Past, Step
from slipway.stage import Context
from slipway.validation.speed import Engine
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE
from slipway_tensorrt_build.params import Range, TensorRTBuildParams
from slipway_tensorrt_build.profiles import plan_profile, positions_of
from support.gpu.decoding import PROMPT, STEPS

from .conftest import Measure, Model

PROVIDER = "TensorrtExecutionProvider"


def test_cuda_says_what_pytorch_says(model: Model, measure: Measure) -> None:
    from slipway_validate.runner.onnx_graphs.load import load

    opened = load(model.folder("onnx"), threads=1)
    if "CUDAExecutionProvider" not in opened.engine.provider:
        pytest.skip(f"not run: ONNX Runtime computes on {opened.engine.provider}")
    assert measure(model, "ONNX Runtime, CUDA", lambda: opened)["kl"] < 1e-4
    assert "CUDAExecutionProvider" in opened.engine.provider  # it went on with the CPU if a call failed


class OnProvider(LanguageModel):
    """A graph of standard operators with a KV cache in ONNX Runtime's provider for TensorRT."""

    has_cache = True
    bounds = Bounds()
    native_dtype = "float32"

    def __init__(self, graph: Path) -> None:
        import onnxruntime

        ranges = {"batch": Range(min=1, opt=1, max=1), "sequence": Range(min=1, opt=1, max=PROMPT)}
        params = TensorRTBuildParams(**ranges, past=Range(min=0, opt=PROMPT, max=PROMPT + STEPS))
        probe = onnxruntime.InferenceSession(graph / "model.onnx", providers=["CPUExecutionProvider"])
        declared = {each.name: each for each in probe.get_inputs()}
        shapes = {name: tuple(n if isinstance(n, int) else -1 for n in each.shape) for name, each in declared.items()}
        profile = plan_profile(shapes, params, positions=positions_of(read_json_object(graph / "config.json")))
        points = {
            f"trt_profile_{point}_shapes": ",".join(
                f"{name}:{'x'.join(map(str, getattr(sizes, point)))}" for name, sizes in profile.items()
            )
            for point in ("min", "opt", "max")
        }
        self._session = onnxruntime.InferenceSession(
            graph / "model.onnx", providers=[(PROVIDER, points), "CUDAExecutionProvider", "CPUExecutionProvider"]
        )
        self._shapes, self._inputs = shapes, set(shapes)
        self._outputs = [each.name for each in self._session.get_outputs()]
        self.device = self._session.get_providers()[0]
        self.engine = Engine(runtime="onnxruntime", version=onnxruntime.__version__, provider=self.device)

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        named = {name: getattr(step, name) for name in ("input_ids", "attention_mask", "position_ids")}
        feeds: dict[str, Any] = {name: value for name, value in named.items() if name in self._inputs}
        feeds |= step.past if step.past is not None else self._empty()
        values = dict(zip(self._outputs, self._session.run(None, feeds), strict=True))
        logits = values.pop("logits")
        return logits, {name.replace(PRESENT_PREFIX, PAST_PREFIX): value for name, value in values.items()}

    def _empty(self) -> dict[str, Any]:
        return {
            name: np.zeros((1, shape[1], 0, shape[3]), dtype=np.float32)
            for name, shape in self._shapes.items()
            if name.startswith(PAST_PREFIX)
        }


def test_tensorrt_s_provider_says_what_pytorch_says(model: Model, measure: Measure, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("tensorrt", reason="not run: tensorrt, whose libraries the provider loads, is not installed")
    if PROVIDER not in onnxruntime.get_available_providers():
        pytest.skip(f"not run: this build of ONNX Runtime has no {PROVIDER}")
    params = OnnxExportParams(runtime="tensorrt", parity="never")
    graph = STAGE.run({"pytorch": model.folder("pytorch")}, params, Context(workdir=tmp_path))["onnx"]
    opened = OnProvider(graph)
    if opened.device != PROVIDER:
        pytest.skip(f"not run: ONNX Runtime cannot load {PROVIDER}, and computes on {opened.device}")
    assert measure(model, "ONNX Runtime, TensorRT", lambda: opened)["kl"] < 1e-3
