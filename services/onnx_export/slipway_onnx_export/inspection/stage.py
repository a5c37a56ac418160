"""The stage behind ``slipway inspect``. No export plans it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.model.activations import GraphReport, Inspection
from slipway.stage import Context, Stage, StageParams

_MOST_GRAPHS = 32


class InspectionParams(StageParams):
    """Parameters of the inspection.

    Attributes:
        file: Name of the graph in the folder; empty for all of them.
    """

    file: str = ""


def run(inputs: Mapping[str, Path], params: InspectionParams, ctx: Context) -> dict[str, Path]:
    """Write ``inspection.json`` (:class:`slipway.model.activations.Inspection`) about the graphs of a folder.

    Raises:
        ONNXExportError: ``ONNX_INVALID`` if there is no graph, or one that cannot be read.
    """
    from slipway.errors import ONNXExportError
    from slipway_onnx_export.inspection.trial import limit_memory, read_graph, run_once

    limit_memory(ctx.max_memory_bytes)
    source = inputs["model"]
    names = [params.file] if params.file else sorted(path.name for path in source.glob("*.onnx"))
    if not names or len(names) > _MOST_GRAPHS:
        raise ONNXExportError(
            f"{source.name} has {len(names)} files that end in .onnx, and 1 to {_MOST_GRAPHS} are inspected",
            reason="ONNX_INVALID",
            remedy="name a graph, or the folder of an export",
        )
    graphs: list[GraphReport] = []
    for name in names:
        ctx.progress("inspect", done=len(graphs), total=len(names), unit="graphs")
        graphs.append(run_once(read_graph(source / name), source / name, threads=ctx.threads))
    folder = ctx.workdir / "inspection"
    folder.mkdir()
    Inspection(graphs=tuple(graphs)).write(folder)
    return {"inspection": folder}


INSPECTION = Stage(
    name="onnx_inspection",
    version=1,
    inputs=("model",),
    outputs=("inspection",),
    params=InspectionParams,
    run=run,
    libraries=("onnx", "onnxruntime"),
)
