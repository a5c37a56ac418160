"""The format ``tensorrt_llm``: a checkpoint folder from which TensorRT-LLM builds engines."""

from __future__ import annotations

from pydantic import Field

from slipway.formats import (
    Fit,
    Format,
    FormatRequest,
    FormatSettings,
    ModelSize,
    Needs,
    PlannedTask,
    Requirements,
    Runtime,
    Usage,
)
from slipway_tensorrt_llm import stage
from slipway_tensorrt_llm.params import MOST_PARTS, Dtype, TensorRTLLMParams


class TensorRTLLMConfiguration(FormatSettings):
    """A TensorRT-LLM checkpoint, from which `trtllm-build` of TensorRT-LLM 1.2 and earlier makes engines. Later releases load the `pytorch` output instead.

    Attributes:
        dtype: Type of all weights, in which engines compute too. `auto` is the model's own.
        tp: GPUs that share each layer (tensor parallelism).
        pp: Groups of layers, each on GPUs of its own (pipeline parallelism). The folder has `tp` times `pp` files of weights.
    """

    dtype: Dtype = "auto"
    tp: int = Field(default=1, ge=1, le=MOST_PARTS)
    pp: int = Field(default=1, ge=1, le=MOST_PARTS)


def _params(settings: TensorRTLLMConfiguration) -> TensorRTLLMParams:
    return TensorRTLLMParams(dtype=settings.dtype, tp=settings.tp, pp=settings.pp)


def plan(request: FormatRequest[TensorRTLLMConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan the checkpoint of the merged model."""
    return (
        PlannedTask(
            id=request.name,
            stage="tensorrt_llm",
            params=_params(request.settings).model_dump(),
            inputs={"pytorch": request.model},
            format=request.name,
            requirements=Requirements(any_of=(Needs(libraries=("ml_dtypes", "numpy")),)),
            output="tensorrt_llm",
        ),
    )


def output_bytes(settings: TensorRTLLMConfiguration, _: str, size: ModelSize) -> int:
    """Estimate the output's size."""
    return stage.output_bytes(_params(settings), size)


FORMAT = Format(
    name="tensorrt_llm",
    title="TensorRT-LLM checkpoint",
    settings=TensorRTLLMConfiguration,
    plan=plan,
    rank=25,
    output_bytes=output_bytes,
    runtime=Runtime(
        name="tensorrt_llm",
        files=("rank0.safetensors",),
        load="slipway_tensorrt_llm.runtime:load",
        precision_file="tensorrt_llm.json",
    ),
    usage=Usage(
        template=("slipway_tensorrt_llm", "usage.example.j2"),
        library="tensorrt_llm",
        packages="'tensorrt-llm>=1.0,<1.3'",
    ),
    fits=(
        Fit(
            "nvidia",
            "TensorRT-LLM 1.2 and earlier build engines for several GPUs from it; later releases load the pytorch output as it is",
            families=("decoder",),
            rank=50,
            source="https://nvidia.github.io/TensorRT-LLM/legacy/tensorrt-backend-removal.html",
        ),
    ),
)
