"""Export a model: open it, build the graph, stream the weights, compare with PyTorch, complete the folder."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from slipway.errors import ONNXExportError
from slipway.models.activations.request import ActivationRequest
from slipway.models.families import DECODER
from slipway.sizes import format_size
from slipway.stage import Context
from slipway_onnx_export.activations.interface import contract_of
from slipway_onnx_export.activations.recording import Wanted
from slipway_onnx_export.engines import Engine, GraphRequest, choose_engine, choose_opset
from slipway_onnx_export.graph import declare_interface, normalize_graph
from slipway_onnx_export.package import complete_folder
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.parity.check import check_parity
from slipway_onnx_export.source import ModelSource, open_source
from slipway_onnx_export.weights import stream_weights

# Peak memory of the comparison divided by the float32 size of the weights: measured 2.05 at 0.6B (4.9 GB for 2.4 GB).
PARITY_OVERHEAD = 2.1


def export_model(source_folder: Path, params: OnnxExportParams, ctx: Context) -> Path:
    """Export the model in ``source_folder`` to ``ctx.workdir / "onnx"`` and return that folder.

    Raises:
        ONNXExportError: With the reasons listed in the README.
    """
    torch.set_num_threads(ctx.threads)
    started = time.monotonic()
    source = open_source(source_folder)
    if params.runtime == "tensorrt" and source.family is not DECODER:
        raise ONNXExportError(
            f"the model's family is {source.family.name}, and graphs for TensorRT are made of text decoders only",
            reason="FAMILY_UNSUPPORTED",
            remedy="leave the TensorRT format out for this model",
            about={"family": source.family.name, "model_type": source.config.model_type},
        )
    engine = choose_engine(source, params)
    opset = choose_opset(engine, params.opset, runtime=params.runtime)

    ctx.progress("graph", done=0, total=1, unit="graphs")
    graphs = engine.build(
        source,
        GraphRequest(
            opset=opset,
            optimize=params.optimize_graph,
            runtime=params.runtime,
            activations=ActivationRequest.of(params.activations),
        ),
    )
    bound = [normalize_graph(made.model, made.weights, source=source, engine=engine.name) for made in graphs]
    components = [made.component if params.dynamic_axes else made.component.fixed_batch() for made in graphs]
    for made, component in zip(graphs, components, strict=True):
        declare_interface(made.model, component)
    ctx.progress("graph", done=1, total=1, unit="graphs")

    folder = ctx.workdir / "onnx"
    folder.mkdir()
    data_bytes = stream_weights(
        [(made.component.file, made.model, weights) for made, weights in zip(graphs, bound, strict=True)],
        folder=folder,
        on_tensor=lambda done, total: ctx.progress("weights", done=done, total=total),
    )
    for made in graphs:
        ir.save(made.model, folder / made.component.file)
        _verify_opset(folder / made.component.file, engine, opset)

    nodes = [node for made in graphs for node in made.model.graph.all_nodes()]
    facts: dict[str, Any] = {
        "engine": engine.name,
        "opset": opset,
        "runtime": params.runtime,
        "architecture": source.architecture,
        "family": source.family.name,
        "files": [made.component.file for made in graphs],
        "precision": "float32",
        "nodes": len(nodes),
        "operators": dict(sorted(Counter(map(_operator, nodes)).items())),
        "graph_bytes": sum((folder / made.component.file).stat().st_size for made in graphs),
        "data_bytes": data_bytes,
    }
    contract = contract_of(components[0])
    if contract is not None:
        contract.write(folder)
        facts["activations"] = [output.name for output in contract.outputs]
    observed = tuple(components[0].observed.modules) if components[0].observed else ()
    facts |= _compare_with_pytorch(source, folder, params, ctx, observed)
    complete_folder(folder, source=source, params=params, facts=facts)
    ctx.record(**facts, seconds=round(time.monotonic() - started, 3))
    return folder


def _operator(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _verify_opset(path: Path, engine: Engine, opset: int) -> None:
    """Read the written file back and check its opset: an engine may fall back to another one silently."""
    import onnx

    written = {entry.domain: entry.version for entry in onnx.load(path, load_external_data=False).opset_import}
    if written.get("", written.get("ai.onnx")) != opset:
        raise ONNXExportError(
            f"engine {engine.name} wrote opset {written.get('')} instead of {opset}",
            reason="OPSET_UNSUPPORTED",
            remedy="choose another opset or engine",
            about={"engine": engine.name, "opset": opset, "written": written.get("")},
        )
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise ONNXExportError(
            f"engine {engine.name} wrote a graph that is not valid in opset {opset}: {str(error).splitlines()[0]}",
            reason="EXPORT_ENGINE_FAILED",
            remedy="use another engine or opset",
            about={"engine": engine.name, "opset": opset},
        ) from error


def _compare_with_pytorch(
    source: ModelSource, folder: Path, params: OnnxExportParams, ctx: Context, observed: Wanted
) -> dict[str, Any]:
    """Compare with PyTorch, unless this is turned off or the memory does not suffice."""
    needed = int(source.fp32_bytes * PARITY_OVERHEAD)
    if params.parity == "never" or (params.parity == "auto" and needed > ctx.max_memory_bytes):
        short = f"needs {format_size(needed)} of {format_size(ctx.max_memory_bytes)}"
        reason = "switched off" if params.parity == "never" else short
        ctx.warn(f"the ONNX model was not compared with PyTorch ({reason}); the validate stage still compares outputs")
        return {"parity": "skipped"}
    report = check_parity(
        source,
        folder,
        tolerance=params.parity_tolerance,
        threads=ctx.threads,
        fixed_batch=not params.dynamic_axes,
        observed=observed,
        on_call=lambda done, total: ctx.progress("parity", done=done, total=total, unit="calls"),
    )
    ctx.progress("parity", done=2 * report.calls, total=2 * report.calls, unit="calls")
    return {
        "parity": "passed",
        "parity_max_abs_diff": report.max_abs_diff,
        "parity_scale": report.scale,
        "parity_calls": report.calls,
        **({} if report.activations is None else {"parity_activations": report.activations}),
    }
