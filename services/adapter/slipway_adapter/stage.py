"""The adapter stage: deliver the adapter unmerged, normalized for servers and llama.cpp, or as factors beside the base's ONNX graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.model.adapters.saved import read_saved
from slipway.sizes import GRAPH_BYTES, ModelSize
from slipway.stage import Context, Effort, Forecast, Stage
from slipway_adapter.params import AdapterParams
from slipway_adapter.rules import check_rules


def run(inputs: Mapping[str, Path], params: AdapterParams, ctx: Context) -> dict[str, Path]:
    """Write the folder of a target.

    Raises:
        AdapterExportError: With the reasons that the package's README lists.
    """
    output = ctx.workdir / "adapter"
    saved = read_saved(inputs["adapter"])
    if params.target == "onnx":
        from slipway_adapter.graph_folder import write_graph_folder

        write_graph_folder(saved, inputs, output, ctx)
    else:
        from slipway_adapter.peft_folder import write_peft_folder

        write_peft_folder(saved, inputs["base"], output, params, ctx)
    return {"adapter": output}


def examine(params: AdapterParams, adapter: Path) -> tuple[str, ...]:
    """Return the cautions about an adapter in a local folder, before anything runs.

    Raises:
        ModelExportError: The stage would refuse it.
    """
    return check_rules(read_saved(adapter), params.target)


def output_bytes(params: AdapterParams, size: ModelSize) -> int:
    """Estimate the output's size: an adapter is small beside its base."""
    return size.graph_bytes + GRAPH_BYTES if params.target == "onnx" else size.weight_bytes // 8 + size.companion_bytes


STAGE = Stage(
    name="adapter",
    version=4,
    inputs=("base", "adapter"),
    optional_inputs=("onnx",),
    outputs=("adapter",),
    params=AdapterParams,
    run=run,
    libraries=("numpy", "onnx-ir", "onnxruntime", "transformers"),
    effort=Effort(seconds=3.0),
    forecast=Forecast(output_bytes=output_bytes, examines=examine),
    recovery=Path(__file__).with_name("recovery.yaml"),
)
