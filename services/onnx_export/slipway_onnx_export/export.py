"""Export a model: open it, build the graph, stream the weights, compare with PyTorch, complete the folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from slipway.errors import ONNXExportError, TracerWarningError
from slipway.model.activations import ActivationRequest
from slipway.model.families import TEXT_FAMILIES
from slipway.model.graphs.weights import LeftOutWeights
from slipway.model.model_files import copy_companions
from slipway.model.weights.reading import store_weights
from slipway.sizes import format_size
from slipway.stage import Context
from slipway_onnx_export.checks.folder import check_folder
from slipway_onnx_export.checks.timing import NotMeasuredError, time_optimization
from slipway_onnx_export.checks.written import WrittenFolder
from slipway_onnx_export.engines import Engine, choose_engine, choose_opset
from slipway_onnx_export.forms.activations import WantedActivations, contract_of
from slipway_onnx_export.forms.components import warn_of_unknown_pooling
from slipway_onnx_export.forms.recurrence import check_form
from slipway_onnx_export.interface import Component, EngineGraph, GraphRequest, describe_sizes, fixed_sizes
from slipway_onnx_export.ir_graphs import Statistics
from slipway_onnx_export.loading.conversion import Weight, place_of
from slipway_onnx_export.packaging.packages import write_packages
from slipway_onnx_export.params import PARITY_OVERHEAD, OnnxExportParams, can_leave_out
from slipway_onnx_export.parity.check import check_parity
from slipway_onnx_export.serving.variant import approximate_gelu, check_family, serve
from slipway_onnx_export.source import ModelSource, open_source
from slipway_onnx_export.writing.graph import axes_of, declare_interface, normalize_graph
from slipway_onnx_export.writing.left_out import WeightsNeededError, leave_out
from slipway_onnx_export.writing.package import complete_folder, folder_of_graphs, metadata_of
from slipway_onnx_export.writing.weights import stream_weights, take_data_in

_MOST_APPROXIMATE = 0.05
"""Largest difference of results with approximated GELUs, relative to the largest; more is a fault."""
_MEASURED = (
    "parity_max_abs_diff",
    "parity_scale",
    "parity_activations",
    "parity_image_features",
    "parity_inputs_embeds",
    "gelu_approximation_max_abs_diff",
    "times",
)
"""Measurements that differ from machine to machine. The folder leaves them out: it is the same on every machine."""


def export_model(inputs: Mapping[str, Path], params: OnnxExportParams, ctx: Context) -> Path:
    """Export the model in ``inputs["pytorch"]`` to ``ctx.workdir / "onnx"`` and return that folder.

    If that folder leaves its weights out, the inputs of the task that made it are among ``inputs``.

    Raises:
        ONNXExportError: With the reasons listed in the README.
    """
    torch.set_num_threads(ctx.threads)
    started = time.monotonic()
    source = open_source(inputs["pytorch"], inputs, parts=params.parts)
    deferred = params.weights == "deferred" and can_leave_out(params)
    if source.stand_ins and not deferred:
        source = _open_with_values(source, ctx)
    try:
        facts = _export(source, params, ctx, deferred=deferred)
    except WeightsNeededError as why:
        ctx.log.info(f"the merged weights are written for this export: {why}")
        facts = _export(_open_with_values(source, ctx), params, ctx, deferred=deferred)
    described = {name: value for name, value in facts.items() if name not in _MEASURED}
    complete_folder(folder_of_graphs(ctx.workdir / "onnx", params), source=source, params=params, facts=described)
    if not deferred:
        write_packages(ctx.workdir / "onnx", level="", ctx=ctx)
    times = facts.pop("times", {})
    statistics = {side: {**each, **times.get(side, {})} for side, each in facts.pop("statistics").items()}
    ctx.record(
        **facts,
        statistics=statistics,
        weights="deferred" if deferred else "stored",
        seconds=round(time.monotonic() - started, 3),
    )
    return ctx.workdir / "onnx"


def _open_with_values(source: ModelSource, ctx: Context) -> ModelSource:
    """Write the weights that the source leaves out into the work folder, and open that folder."""
    folder = ctx.workdir / "merged"
    folder.mkdir()
    with source.open() as weights:
        store_weights(weights, folder, on_bytes=lambda done, total: ctx.progress("weights", done=done, total=total))
    copy_companions(source.folder, folder)
    return open_source(folder)


def _export(source: ModelSource, params: OnnxExportParams, ctx: Context, *, deferred: bool) -> dict[str, Any]:
    """Make the graphs, and write them with their weights; return the facts about them.

    Raises:
        WeightsNeededError: The graphs need values of weights that the source makes only when they are read; nothing is written.
    """
    if params.runtime == "tensorrt" and source.family not in TEXT_FAMILIES:
        raise ONNXExportError(
            f"the model's family is {source.family.name}, and graphs for TensorRT are made of text decoders and encoders only",
            reason="FAMILY_UNSUPPORTED",
            remedy="leave the TensorRT format out for this model",
            about={"family": source.family.name, "model_type": source.config.model_type},
        )
    warn_of_unknown_pooling(source, ctx)
    pictures = params.parts == "all" and source.takes_more_than_text
    if source.takes_more_than_text and not pictures:
        ctx.warn("the ONNX model has the text part alone: images and sound are not among its inputs")
    elif pictures and getattr(source.config, "audio_config", None) is not None:
        ctx.warn("the ONNX model takes text and images: sound is not among its inputs")
    engine = choose_engine(source, params)
    known = {"engine": engine.name, "family": source.family.name}
    try:
        check_family(source, params.promise)
        check_form(source, params, engine=engine.name)
        sizes = fixed_sizes(source, params)
        opset = choose_opset(engine, params.opset, runtime=params.runtime)
        request = GraphRequest(
            opset=opset,
            runtime=params.runtime,
            optimization=params.optimization,
            attention=params.attention,
            cache=params.cache,
            sizes=sizes,
            prove_warnings=params.tracer_warnings == "prove",
            activations=ActivationRequest.of(params.activations),
            promise=params.promise,
            layered=params.layered,
            pictures=pictures,
        )
        ctx.progress("graph", done=0, total=1, unit="graphs")
        graphs = engine.build(source, request)
        known["attention"] = graphs[0].attention
        return _write(graphs, source, ctx, engine=engine, request=request, params=params, deferred=deferred)
    except ONNXExportError as error:
        error.about = {**known, **error.about}  # recovery chooses the next attempt by these
        raise


def _write(
    graphs: list[EngineGraph],
    source: ModelSource,
    ctx: Context,
    *,
    engine: Engine,
    request: GraphRequest,
    params: OnnxExportParams,
    deferred: bool,
) -> dict[str, Any]:
    """Write and compare the graphs; return the facts about them."""
    bound = _normalize(graphs, source, engine=engine, pictures=request.pictures)
    graphs = [serve(made, weights, request.promise) for made, weights in zip(graphs, bound, strict=True)]
    for made in graphs:
        declare_interface(made.model, made.component)
    ctx.progress("graph", done=1, total=1, unit="graphs")
    files = [(made.component.file, made.model, weights) for made, weights in zip(graphs, bound, strict=True)]
    left_out = leave_out(files, source) if deferred else {}

    folder = folder_of_graphs(ctx.workdir / "onnx", params)
    folder.mkdir(parents=True)
    data_bytes = stream_weights(
        files,
        folder=folder,
        threads=ctx.threads,
        on_tensor=lambda done, total: ctx.progress("weights", done=done, total=total),
    )
    if deferred:
        LeftOutWeights(stage="onnx_export", model="pytorch", graphs=left_out).write(folder)
    components = []
    if not params.external_data:
        take_data_in([(made.component.file, made.model) for made in graphs], folder=folder)
    metadata = metadata_of(source, lineage=ctx.input_digests.get("pytorch", ""))
    for made in graphs:
        made.model.metadata_props.update({**metadata, **made.component.promise.metadata})
        ir.save(made.model, folder / made.component.file)
        components.append(made.component)
    written = WrittenFolder(folder, tuple(components), request.opset, source.end, metadata, left_out)
    checks = check_folder(written, engine=engine.name)

    before, after = (
        sum((made.unoptimized for made in graphs), Statistics()),
        Statistics.of(made.model for made in graphs),
    )
    facts: dict[str, Any] = {
        "engine": engine.name,
        "opset": request.opset,
        "runtime": params.runtime,
        "architecture": source.architecture,
        "family": source.family.name,
        **({"parts": ["text", *(["images"] if request.pictures else [])]} if source.takes_more_than_text else {}),
        "files": [made.component.file for made in graphs],
        "precision": "float32",
        "shapes": params.shapes,
        "axes": {made.component.file: axes_of(made.model) for made in graphs},
        "attention": graphs[0].attention,
        "cache": source.family.generates and params.cache,
        **({"layered": True} if params.layered else {}),
        "nodes": after.nodes,
        "operators": dict(after.operators),
        "statistics": {"before": before.record(), "after": after.record()},
        "graph_bytes": sum((folder / made.component.file).stat().st_size for made in graphs),
        "data_bytes": data_bytes,
        "checks": checks,
    }
    if request.sizes:
        facts["fixed_sizes"] = dict(request.sizes)
        ctx.warn(describe_sizes(request.sizes))
    contract = contract_of(components)
    if contract is not None:
        contract.write(folder)
        facts["activations"] = [output.name for graph in contract.graphs for output in graph.outputs]
    unproven = sorted({place for made in graphs for place in made.unproven})
    if deferred:
        facts["parity"] = "not run: the quantize stage reads the weights; the validation compares its result"
    else:
        facts |= _compare_with_pytorch(source, folder, params, ctx, components, must=unproven, sizes=request.sizes)
        if params.optimization_times:
            facts |= _time_optimization(graphs, source, ctx, engine=engine, request=request, written=written)
        facts |= {"proven_harmless": unproven} if unproven else {}
    if params.gelu_approximation:
        facts |= _approximate_gelu(facts, source, ctx, params=params, written=written, sizes=request.sizes)
    return facts


def _normalize(
    graphs: list[EngineGraph], source: ModelSource, *, engine: Engine, pictures: bool
) -> list[dict[str, Weight]]:
    """Normalize the graphs; return the tensors of each. The table that embeds tokens may be the decoder's head, in another graph."""
    read_before: set[tuple[object, ...]] = set()
    bound = []
    for made in graphs:
        weights = normalize_graph(
            made.model, made.weights, source=source, engine=engine.name, natural=read_before if pictures else ()
        )
        read_before |= set(map(place_of, weights.values()))
        bound.append(weights)
    return bound


def _approximate_gelu(
    facts: Mapping[str, Any],
    source: ModelSource,
    ctx: Context,
    *,
    params: OnnxExportParams,
    written: WrittenFolder,
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """Approximate the GELUs of the written graphs; return the facts that changed, and how far the results moved."""
    files = [written.folder / component.file for component in written.components]
    count = approximate_gelu(files)
    if not count:
        ctx.warn("the ONNX model has no exact GELU, so nothing of it is approximated (formats.onnx.gelu_approximation)")
        return {}
    after = Statistics.of(map(ir.load, files))
    changes: dict[str, Any] = {
        "gelu_approximation": count,
        "nodes": after.nodes,
        "operators": dict(after.operators),
        "statistics": {**facts["statistics"], "after": after.record()},
        "graph_bytes": sum(path.stat().st_size for path in files),
        "checks": check_folder(replace(written), engine=facts["engine"]),
    }
    if facts.get("parity") == "passed":
        report = check_parity(
            source,
            written.folder,
            tolerance=_MOST_APPROXIMATE,
            threads=ctx.threads,
            sizes=sizes,
            promise=written.components[0].promise,
            cached=params.cache,
            provider=params.provider,
        )
        changes["gelu_approximation_max_abs_diff"] = report.max_abs_diff
    return changes


def _time_optimization(
    graphs: list[EngineGraph],
    source: ModelSource,
    ctx: Context,
    *,
    engine: Engine,
    request: GraphRequest,
    written: WrittenFolder,
) -> dict[str, Any]:
    """Return the times of prefill and decode before and after the optimization, or warn that there are none."""
    try:
        times = time_optimization(
            graphs, source, engine=engine, request=request, folder=written.folder, threads=ctx.threads, end=written.end
        )
    except (NotMeasuredError, ONNXExportError) as why:
        ctx.warn(f"the optimization of the ONNX graph was not timed: {why}")
        return {}
    return {"times": {side: {f"{name}_ms": value for name, value in each.items()} for side, each in times.items()}}


def _compare_with_pytorch(
    source: ModelSource,
    folder: Path,
    params: OnnxExportParams,
    ctx: Context,
    components: Sequence[Component],
    *,
    sizes: Mapping[str, int],
    must: Sequence[str],
) -> dict[str, Any]:
    """Compare with PyTorch, unless that is turned off or memory is short. Only this proves the places in ``must`` harmless."""
    observed: WantedActivations = tuple(name for each in components if each.observed for name in each.observed.modules)
    needed = int(source.fp32_bytes * PARITY_OVERHEAD)
    if params.parity == "never" or (params.parity == "auto" and needed > ctx.max_memory_bytes):
        short = f"needs {format_size(needed)} of {format_size(ctx.max_memory_bytes)}"
        reason = "switched off" if params.parity == "never" else short
        if must:
            raise TracerWarningError(
                f"the trace depends on its sample at {must[0]}, and the comparison that could prove it harmless {short}",
                remedy="give the export more memory, or use engine dynamo",
                about={"places": "\n".join(must), "proof": "impossible"},
            )
        ctx.warn(f"the ONNX model was not compared with PyTorch ({reason}); the validate stage still compares outputs")
        return {"parity": "skipped"}
    report = check_parity(
        source,
        folder,
        tolerance=params.parity_tolerance,
        threads=ctx.threads,
        sizes=sizes,
        observed=observed,
        promise=components[0].promise,
        cached=params.cache,
        spare_bytes=ctx.max_memory_bytes - needed,
        provider=params.provider,
        on_call=lambda done, total: ctx.progress("parity", done=done, total=total, unit="calls"),
    )
    ctx.progress("parity", done=2 * report.calls, total=2 * report.calls, unit="calls")
    if report.note:
        ctx.warn(f"the ONNX model was compared on the CPU: {report.note}")
    unseen = dict(report.lengths.unseen)
    if report.reach.why and report.reach.matters:
        ctx.warn(f"the ONNX model was not compared beyond its attention window: {report.reach.why}")
        unseen[report.reach.window] = report.reach.why
    if must and unseen:
        tokens = min(unseen)
        raise TracerWarningError(
            f"the trace depends on its sample at {must[0]}, and beyond {tokens} tokens, where the model computes otherwise, "
            f"nothing proves it harmless: {unseen[tokens]}",
            remedy="use engine dynamo with opset 18 or later",
            about={"places": "\n".join(must), "proof": "impossible", "tokens": tokens},
        )
    for tokens, why in report.lengths.unseen.items():
        ctx.warn(f"the ONNX model was not compared beyond {tokens} tokens, where it computes otherwise: {why}")
    return {
        "parity": "passed",
        **({"window": report.reach.record} if report.reach.window else {}),
        **({"thresholds": record} if (record := report.lengths.record) else {}),
        "parity_provider": report.provider,
        "parity_max_abs_diff": report.max_abs_diff,
        "parity_scale": report.scale,
        "parity_calls": report.calls,
        **({} if report.activations is None else {"parity_activations": report.activations}),
        **{f"parity_{name}": diff for name, diff in report.beside.items()},
    }
