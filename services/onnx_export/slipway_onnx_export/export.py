"""Export a model: open it, build the graph, stream the weights, compare with PyTorch, complete the folder."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from slipway.errors import ONNXExportError
from slipway.models.base_format import read_config
from slipway.models.families import described
from slipway.models.model_files import CONFIG
from slipway.sizes import format_size
from slipway.stage import Context
from slipway_onnx_export.engines import ENGINES, Engine, GraphRequest, choose_opset
from slipway_onnx_export.families import refusal_reason
from slipway_onnx_export.graph import declare_interface, normalize_graph
from slipway_onnx_export.package import complete_folder
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.parity import check_parity
from slipway_onnx_export.source import ModelSource, open_source
from slipway_onnx_export.weights import stream_weights

MODEL_FILE = "model.onnx"
# Peak memory of the comparison divided by the float32 size of the weights: measured 2.05 at 0.6B (4.9 GB for 2.4 GB).
PARITY_OVERHEAD = 2.1


def export_model(source_folder: Path, params: OnnxExportParams, ctx: Context) -> Path:
    """Export the model in ``source_folder`` to ``ctx.workdir / "onnx"`` and return that folder.

    Raises:
        ONNXExportError: With the reasons listed in the README.
    """
    torch.set_num_threads(ctx.threads)
    started = time.monotonic()
    if (source_folder / CONFIG).is_file():
        _refuse_unknown_families(source_folder)
    engine = ENGINES[params.engine]
    opset = choose_opset(engine, params.opset, runtime=params.runtime)
    source = open_source(source_folder)

    ctx.progress("graph", done=0, total=1, unit="graphs")
    model, weights = _build_graph(source, engine, opset, params)
    ctx.progress("graph", done=1, total=1, unit="graphs")

    folder = ctx.workdir / "onnx"
    folder.mkdir()
    data_bytes = stream_weights(
        model, weights, folder=folder, on_tensor=lambda done, total: ctx.progress("weights", done=done, total=total)
    )
    ir.save(model, folder / MODEL_FILE)
    _verify_opset(folder / MODEL_FILE, engine, opset)

    facts: dict[str, Any] = {
        "engine": engine.name,
        "opset": opset,
        "runtime": params.runtime,
        "architecture": source.architecture,
        "precision": "float32",
        "nodes": sum(1 for _ in model.graph.all_nodes()),
        "operators": dict(sorted(Counter(_operator(node) for node in model.graph.all_nodes()).items())),
        "graph_bytes": (folder / MODEL_FILE).stat().st_size,
        "data_bytes": data_bytes,
    }
    facts |= _compare_with_pytorch(source, folder / MODEL_FILE, params, ctx)
    complete_folder(folder, source=source, params=params, facts=facts)
    ctx.record(**facts, seconds=round(time.monotonic() - started, 3))
    return folder


def _build_graph(
    source: ModelSource, engine: Engine, opset: int, params: OnnxExportParams
) -> tuple[ir.Model, dict[str, torch.Tensor]]:
    made = engine.build(source, GraphRequest(opset=opset, optimize=params.optimize_graph, runtime=params.runtime))
    weights = normalize_graph(made.model, made.weights, source=source, engine=engine.name)
    declare_interface(made.model, source, dynamic_axes=params.dynamic_axes)
    return made.model, weights


def _operator(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _refuse_unknown_families(folder: Path) -> None:
    """Refuse a model that no engine exports, before any engine is tried."""
    config = read_config(folder)
    why = refusal_reason(config)
    if why:
        raise ONNXExportError(
            why,
            reason="FAMILY_UNSUPPORTED",
            remedy="leave the ONNX format out for this model",
            about={"family": described(config), "model_type": config.get("model_type")},
        )


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


def _compare_with_pytorch(source: ModelSource, path: Path, params: OnnxExportParams, ctx: Context) -> dict[str, Any]:
    """Compare with PyTorch, unless this is turned off or the memory does not suffice."""
    needed = int(source.fp32_bytes * PARITY_OVERHEAD)
    if params.parity == "never" or (params.parity == "auto" and needed > ctx.max_memory_bytes):
        short = f"needs {format_size(needed)} of {format_size(ctx.max_memory_bytes)}"
        reason = "switched off" if params.parity == "never" else short
        ctx.warn(f"the ONNX model was not compared with PyTorch ({reason}); the validate stage still compares outputs")
        return {"parity": "skipped"}
    report = check_parity(
        source,
        path,
        tolerance=params.parity_tolerance,
        threads=ctx.threads,
        fixed_batch=not params.dynamic_axes,
        on_call=lambda done, total: ctx.progress("parity", done=done, total=total, unit="calls"),
    )
    ctx.progress("parity", done=2 * report.calls, total=2 * report.calls, unit="calls")
    return {
        "parity": "passed",
        "parity_max_abs_diff": report.max_abs_diff,
        "parity_scale": report.scale,
        "parity_calls": report.calls,
    }
