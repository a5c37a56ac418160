"""The stages torchscript and torch_export: write a merged PyTorch model as a graph that runs without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Effort, Forecast, Hardware, Stage
from slipway_torchscript.params import TorchExportParams, TorchScriptParams, refusal_reason

_LIBRARIES = ("torch", "transformers")


def write_torchscript(inputs: Mapping[str, Path], params: TorchScriptParams, ctx: Context) -> dict[str, Path]:
    """Write ``inputs["pytorch"]`` as ``model.pt``; the README describes the output folder.

    Raises:
        slipway.errors.TorchGraphError: With the reasons that the README lists.
    """
    from slipway_torchscript.export import export_torchscript

    target = ctx.workdir / "torchscript"
    target.mkdir()
    export_torchscript(inputs["pytorch"], target, params, ctx)
    return {"torchscript": target}


def write_torch_export(inputs: Mapping[str, Path], params: TorchExportParams, ctx: Context) -> dict[str, Path]:
    """Write ``inputs["pytorch"]`` as ``model.pt2``; the README describes the output folder.

    Raises:
        slipway.errors.TorchGraphError: With the reasons that the README lists.
    """
    from slipway_torchscript.export import export_program

    target = ctx.workdir / "torch_export"
    target.mkdir()
    export_program(inputs["pytorch"], target, params, ctx)
    return {"torch_export": target}


TORCHSCRIPT = Stage(
    name="torchscript",
    version=1,
    inputs=("pytorch",),
    outputs=("torchscript",),
    params=TorchScriptParams,
    run=write_torchscript,
    libraries=_LIBRARIES,
    effort=Effort(seconds=15.0, seconds_per_gb=20.0),
    forecast=Forecast(
        output_bytes=lambda params, size: size.at_level(params.level), refuses=lambda _, config: refusal_reason(config)
    ),
    hardware=Hardware(memory=3.0),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
TORCH_EXPORT = Stage(
    name="torch_export",
    version=1,
    inputs=("pytorch",),
    outputs=("torch_export",),
    params=TorchExportParams,
    run=write_torch_export,
    libraries=_LIBRARIES,
    effort=Effort(seconds=30.0, seconds_per_gb=30.0),
    forecast=Forecast(
        output_bytes=lambda params, size: size.at_level(params.level), refuses=lambda _, config: refusal_reason(config)
    ),
    hardware=Hardware(memory=3.0),
    recovery=Path(__file__).with_name("recovery_of_programs.yaml"),
)
