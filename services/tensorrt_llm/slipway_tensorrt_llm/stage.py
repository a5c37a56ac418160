"""The tensorrt_llm stage: write a merged model as a checkpoint folder for TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.sizes import ModelSize
from slipway.stage import Context, Effort, Forecast, Stage
from slipway_tensorrt_llm.models.model import refusal_reason
from slipway_tensorrt_llm.params import TensorRTLLMParams

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_REPEATED = 0.02
"""Largest share of the weights that each further GPU repeats: one head of keys and values in each layer of known models."""


def run(inputs: Mapping[str, Path], params: TensorRTLLMParams, ctx: Context) -> dict[str, Path]:
    """Write ``inputs["pytorch"]`` as a checkpoint; the README describes the output folder.

    Raises:
        slipway.errors.TensorRTLLMExportError: With the reasons that the README lists.
    """
    from slipway_tensorrt_llm.export import export_model

    return {"tensorrt_llm": export_model(inputs["pytorch"], params, ctx)}


def output_bytes(params: TensorRTLLMParams, size: ModelSize) -> int:
    """Return an upper estimate of a folder's size.

    A tied head is stored too, each GPU of a layer has the embedding, and several may have the same keys.
    """
    tp, each = params.tp, _BYTES.get(params.dtype)
    weights, largest = (size.weights * each, size.largest * each) if each else (size.weight_bytes, size.largest_bytes)
    return int(weights * (1 + _REPEATED * (tp - 1))) + tp * largest + size.companion_bytes


STAGE = Stage(
    name="tensorrt_llm",
    version=1,
    inputs=("pytorch",),
    outputs=("tensorrt_llm",),
    params=TensorRTLLMParams,
    run=run,
    libraries=("ml_dtypes", "numpy"),
    effort=Effort(seconds=1.0, seconds_per_gb=4.0, phases={"weights": (0.0, 0.6), "checking": (0.6, 1.0)}),
    forecast=Forecast(output_bytes=output_bytes, refuses=refusal_reason),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
