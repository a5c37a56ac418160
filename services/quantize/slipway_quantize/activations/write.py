"""Write ONNX graphs whose products are of codes: weights rounded per output feature, activations rounded too."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import onnx_ir as ir

from slipway.errors import QuantizationError
from slipway.stage import Context
from slipway_quantize.activations.codes import PLAIN, Array, Codes, Form, Ranges, write_channels
from slipway_quantize.activations.products import (
    DynamicProducts,
    StaticProducts,
    replace_by_channels,
    replace_by_joined,
)
from slipway_quantize.graphs.folder import (
    DataFile,
    Shared,
    copy_external,
    graph_files,
    load_graph,
    read_constant,
    save_graph,
)
from slipway_quantize.graphs.left_out import LeftOutSource
from slipway_quantize.graphs.weights import Weight, find_weights, kept_reason, linear_layers_of
from slipway_quantize.pieces import Pieces
from slipway_quantize.report import KEPT, Outcome, warn_unknown
from slipway_quantize.sensitive import kept_names

_PARTS = re.compile(r"(?P<path>(?:.+\.)?)(?P<module>[^.]+)(?P<end>\.weight(?:\.T)?)")
_LOOKED_UP = "tokens are looked up in it, which TensorRT does not do in codes"


def write_products(
    source: Path,
    target: Path,
    *,
    keep: Sequence[str],
    left_out: LeftOutSource,
    ctx: Context,
    ranges: Ranges | None = None,
    form: Form = PLAIN,
) -> Outcome:
    """Write ``source``'s graphs into ``target`` with products of codes; some weights may be in ``left_out``.

    Args:
        source: The folder.
        target: Receives the graphs.
        keep: Names of linear layers that keep their type.
        left_out: Weights that the graphs leave out.
        ctx: Context of the stage.
        ranges: Ranges of the activations; None: each is measured while the graph runs.
        form: How the products are written, if ranges are known.

    Raises:
        QuantizationError: ``ONNX_INVALID``, ``NON_FINITE_WEIGHTS``, or ``QUANTIZATION_UNSUPPORTED``.
    """
    graphs = [(name, load_graph(source, name)) for name in graph_files(source)]
    for name, model in graphs:
        require_opset(model, name, form.codes)
    left_out_bytes = sum(left_out.put_in(model, name) for name, model in graphs)
    outcome = Outcome(
        method=f"{form.codes.name} per output feature, activations {form.codes.name} "
        + ("with a range of each token" if ranges is None else "(QDQ)"),
        left_out_bytes=left_out_bytes,
    )
    matrices = {name: find_weights(model.graph) for name, model in graphs}
    total = sum(math.prod(weight.features) for weights in matrices.values() for weight in weights)
    if not total:
        raise QuantizationError(
            "the graph has no product with a constant matrix",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="use level fp16, or int8 for the PyTorch format",
        )
    done, shared = 0, Shared()
    for name, model in graphs:
        with DataFile(target, name, shared) as data, Pieces(outcome, threads=ctx.threads) as pieces:
            products = DynamicProducts(model) if ranges is None else StaticProducts(model, ranges.of, form)
            for weights in _join_weights(matrices[name], keep, ranges):
                ctx.progress("quantize", done=done, total=total, unit="weights")
                done += sum(math.prod(weight.features) for weight in weights)
                why = _kept_reason(weights[0], keep, ranges)
                if not why and form.dequantized_first and not weights[0].products:
                    why = _LOOKED_UP
                if why:
                    outcome.kept[weights[0].name] = why
                    continue
                write = partial(
                    write_channels,
                    weights,
                    [read_constant(source, weight.value.const_value) for weight in weights],
                    None if ranges is None else _factors(weights[0], ranges),
                    codes=form.codes,
                    name=joined_name(weights),
                    data=data,
                    pieces=pieces,
                )
                if len(weights) > 1:
                    replace_by_joined(model, weights, write(), products, name=joined_name(weights))
                else:
                    kind = f"{form.codes.name} per output feature, {weights[0].transposed}"
                    channels = data.write_once(weights[0].value.const_value, kind, write)
                    replace_by_channels(model, weights[0], channels, products)
                outcome.quantized += [weight.name for weight in weights]
            copy_external(source, model, data)
        save_graph(model, target, name)
    ctx.progress("quantize", done=done, total=total, unit="weights")
    asked = [module for name, why in outcome.kept.items() if why == KEPT for module in linear_layers_of(name)]
    warn_unknown(kept_names(keep), asked, ctx)
    if ranges is not None:
        outcome.details |= ranges.facts
    return outcome


def _join_weights(weights: Sequence[Weight], keep: Sequence[str], ranges: Ranges | None) -> list[list[Weight]]:
    """Group the weights that multiply the same values, if ranges are known."""
    made: list[list[Weight]] = []
    groups: dict[tuple[object, ...], list[Weight]] = {}
    for weight in weights:
        plain = len(weight.products) == 1 and not weight.lookups and _PARTS.fullmatch(weight.name)
        if ranges is None or not plain or _kept_reason(weight, keep, ranges):
            made.append([weight])
            continue
        key = (inputs_of(weight)[0], weight.transposed, plain["path"], plain["end"])
        if key not in groups:
            groups[key] = []
            made.append(groups[key])
        groups[key].append(weight)
    return made


def joined_name(weights: Sequence[Weight]) -> str:
    """Return the name of weights whose output features follow each other: ``layers.0.q_proj+k_proj.weight.T``."""
    parts = [_PARTS.fullmatch(weight.name) for weight in weights]
    if len(weights) == 1 or not all(parts):
        return weights[0].name
    matches = [part for part in parts if part]
    return f"{matches[0]['path']}{'+'.join(part['module'] for part in matches)}{matches[0]['end']}"


def _kept_reason(weight: Weight, keep: Sequence[str], ranges: Ranges | None) -> str:
    if why := kept_reason(weight.name, keep):
        return why
    if ranges is None:
        return ""
    return next((ranges.kept[name] for name in inputs_of(weight) if name in ranges.kept), "")


def _factors(weight: Weight, ranges: Ranges) -> Array | None:
    return next((ranges.of[name].factors for name in inputs_of(weight)), None)


def inputs_of(weight: Weight) -> list[str]:
    """Return the names of the values that are multiplied by a matrix, each once; none for a table that is only looked up."""
    names = [str(node.inputs[0].name) for node in weight.products if node.inputs[0] is not None]
    return list(dict.fromkeys(names))


def require_opset(model: ir.Model, name: str, codes: Codes) -> None:
    """Refuse a graph whose operators have no scale per output feature.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``.
    """
    opset = model.opset_imports.get("", codes.opset)
    if opset < codes.opset:
        raise QuantizationError(
            f"{name} has opset {opset}, and {codes.name} for activations needs {codes.opset}",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy=f"write the graph with opset {codes.opset} or later, or use level int8 or fp16",
            about={"opset": opset},
        )
