"""The tensorrt_build stage: it builds TensorRT engines from an ONNX graph, one file per GPU architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, TEXT_FAMILIES
from slipway.stage import Context, Effort, Forecast, Hardware, Installation, Keeps, Stage
from slipway_tensorrt_build.builders import probe
from slipway_tensorrt_build.params import TensorRTBuildParams
from slipway_tensorrt_build.profiles import check_positions, positions_of


def run(inputs: Mapping[str, Path], params: TensorRTBuildParams, ctx: Context) -> dict[str, Path]:
    """Build engines from ``inputs["onnx"]``.

    Raises:
        slipway.errors.TensorRTBuildError: With the reasons the package's README lists.
    """
    from slipway_tensorrt_build.build import build_engines

    target = ctx.workdir / "tensorrt"
    target.mkdir()
    build_engines(inputs["onnx"], target, params, ctx)
    return {"tensorrt": target}


def refusal_reason(config: ModelConfig) -> str:
    """Return why no engine is built for the model with this ``config.json``; empty if one is."""
    if config.family in TEXT_FAMILIES and config.keeps_states:
        return f"the model is {config.description} with layers that keep a state, for which TensorRT has no operator"
    if config.family in TEXT_FAMILIES:
        return ""
    return f"the model is {config.description}, and engines are built for text decoders and encoders only"


def check_ranges(params: TensorRTBuildParams, config: ModelConfig) -> None:
    """Refuse ranges that begin beyond the positions of the model with this ``config.json``, before the graph is exported.

    Raises:
        slipway.errors.TensorRTBuildError: ``TENSORRT_PROFILE_INVALID``.
    """
    check_positions(params, positions_of(config), cached=config.family is DECODER)


STAGE = Stage(
    name="tensorrt_build",
    version=3,
    inputs=("onnx",),
    outputs=("tensorrt",),
    params=TensorRTBuildParams,
    run=run,
    libraries=("tensorrt", "tensorrt-rtx"),
    keeps=Keeps.MEMORY,
    forecast=Forecast(
        output_bytes=lambda _, size: size.graph_bytes,
        describes=check_ranges,
        refuses=lambda _, config: refusal_reason(config),
    ),
    hardware=Hardware(device_bound=True, gpu_memory=1.0, gpu_bound_output=True),
    installation=Installation(probe=probe, alternatives=True),
    effort=Effort(seconds=60.0, seconds_per_gb=120.0),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
