"""Write ONNX graphs with int8 or int4 weights: MatMulNBits, and GatherBlockQuantized for the token embedding.

A tied embedding and lm_head share one quantized tensor. Axes: N output features (or tokens), K input features,
G = K / group size groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slipway.errors import QuantizationError
from slipway.model.configuration import ModelConfig
from slipway.model.dtypes import DTYPES, numpy_dtypes
from slipway.stage import Context
from slipway_quantize.calibrated import Calibration
from slipway_quantize.graphs.folder import (
    DataFile,
    Shared,
    add_initializer,
    bind,
    copy_external,
    graph_files,
    load_graph,
    read_constant,
    row_chunks,
    save_graph,
)
from slipway_quantize.graphs.integers import CalibratedWeights, Integers, choose_graph_bits, find_integers
from slipway_quantize.graphs.left_out import LazyMatrix, LeftOutSource
from slipway_quantize.graphs.weights import (
    Weight,
    add_inline_constant,
    find_weights,
    kept_reason,
    linear_layers_of,
    remove_unused,
    replace_node,
)
from slipway_quantize.levels import IntLevel, SizeBudget
from slipway_quantize.pieces import Pieces, Squares
from slipway_quantize.report import Outcome, warn_unaligned, warn_unknown
from slipway_quantize.sensitive import kept_names

_CONTRIB = "com.microsoft"
_LINE = 16
"""Output features that share a line of the processor's cache, if the matrix is stored input features first."""


def write_int(
    source: Path,
    target: Path,
    level: IntLevel,
    *,
    config: ModelConfig,
    accuracy_level: int,
    left_out: LeftOutSource,
    ctx: Context,
    calibration: Calibration | None = None,
    widths: tuple[int, ...] = (),
    budget: SizeBudget | None = None,
    head_bits: int = 0,
) -> Outcome:
    """Write the graphs in ``source``, made of a model with ``config``, into ``target`` with weight matrices in ``level``; some may be in ``left_out``.

    Inputs and outputs keep their names and types. With a budget, each weight gets one of ``widths`` as its bits; the head and the table of
    token embeddings get at least ``head_bits``, unless a calibration has them.

    Raises:
        QuantizationError: ``ONNX_INVALID``, ``NON_FINITE_WEIGHTS``, ``CALIBRATION_MISMATCH``, ``SIZE_BUDGET_UNMET``, or ``QUANTIZATION_UNSUPPORTED``
            if the graphs have no weight that can be quantized.
    """
    graphs = [(name, load_graph(source, name)) for name in graph_files(source)]
    left_out_bytes = sum(left_out.put_in(model, name) for name, model in graphs)
    matrices = {name: find_weights(model.graph) for name, model in graphs}
    reasons = {weight.name: kept_reason(weight.name, level.keep) for weights in matrices.values() for weight in weights}
    asked = {name: why for name, why in reasons.items() if why}
    fits = {
        name: [one for one in weights if one.features[1] % level.group_size == 0 and one.name not in asked]
        for name, weights in matrices.items()
    }
    if not any(fits.values()):
        raise QuantizationError(
            f"none of the graph's {sum(map(len, matrices.values()))} weight matrices has an input width that is a multiple of "
            f"the group size {level.group_size}",
            reason="QUANTIZATION_UNSUPPORTED",
            remedy="choose a smaller group size, or level fp16",
            about={"group_size": level.group_size, "weights": sum(map(len, matrices.values()))},
        )
    outcome = Outcome(
        method="MatMulNBits" if level.packed else "dense weights on the grid", left_out_bytes=left_out_bytes
    )
    if level.packed:
        outcome.details["accuracy_level"] = accuracy_level
    given = find_integers(fits, graphs, calibration, ctx, but=asked) if calibration else {}
    least = _least_bits(config, fits, given, level=level, head_bits=head_bits)
    scale_dtype = _scale_dtype(config)
    if budget is not None:
        choice = choose_graph_bits(
            source,
            graphs,
            fits,
            given,
            level=level,
            widths=widths,
            least=least,
            scale_dtype=scale_dtype,
            budget=budget,
            ctx=ctx,
        )
        outcome.bits = dict(choice.bits)
        outcome.details["mixed_precision"] = dict(choice.facts)
    elif len({level.bits, *least.values()}) > 1:
        outcome.bits = least
    total = sum(math.prod(weight.features) for weights in fits.values() for weight in weights)
    done, shared, unaligned = 0, Shared(), []
    for name, model in graphs:
        with DataFile(target, name, shared) as data, Pieces(outcome, threads=ctx.threads) as pieces:
            for weight in fits[name]:
                ctx.progress("quantize", done=done, total=total, unit="weights")
                values = read_constant(source, weight.value.const_value)
                own = replace(level, bits=outcome.bits.get(weight.name, level.bits))
                calibrated = given.get((name, weight.name))
                if calibrated is not None and calibrated.bits != own.bits:
                    calibrated = None
                integers = Integers(weight, own, scale_dtype, calibrated)
                if level.packed:
                    _replace_by_integers(
                        model, integers, values, accuracy_level=accuracy_level, data=data, pieces=pieces
                    )
                else:
                    _round_in_place(integers, values, data=data, pieces=pieces)
                outcome.quantized.append(weight.name)
                if given:
                    outcome.methods[weight.name] = integers.method
                done += math.prod(weight.features)
            copy_external(source, model, data)
        unaligned += [weight.name for weight in matrices[name] if weight not in fits[name] and weight.name not in asked]
        save_graph(model, target, name)
    ctx.progress("quantize", done=done, total=total, unit="weights")
    warn_unaligned(unaligned, level.group_size, ctx)
    warn_unknown(kept_names(level.keep), [module for name in asked for module in linear_layers_of(name)], ctx)
    outcome.kept = dict.fromkeys(unaligned, "input width is not a multiple of the group size")
    outcome.kept |= dict(sorted(asked.items()))
    return outcome


def _scale_dtype(config: Mapping[str, Any]) -> np.dtype[Any]:
    """Return the stored type of scales: the 16-bit type of the source model's checkpoint, otherwise float32."""
    stored = config.get("dtype") or config.get("torch_dtype")
    halves = {DTYPES[name].torch: dtype for name, dtype in numpy_dtypes("F16", "BF16").items()}
    return halves.get(stored if isinstance(stored, str) else "", np.dtype(np.float32))


def _least_bits(
    config: ModelConfig,
    fits: Mapping[str, Sequence[Weight]],
    given: CalibratedWeights,
    *,
    level: IntLevel,
    head_bits: int,
) -> dict[str, int]:
    """Return the fewest bits of each weight, by name: its calibration's, or the level's; the head and the table get ``head_bits``."""
    vocabulary = config.vocabulary
    bits = {}
    for graph, weights in fits.items():
        # Only the last matrix with one result per token: a projection may have as many by chance.
        head = next((weight for weight in reversed(weights) if weight.features[0] == vocabulary), None)
        for weight in weights:
            is_head = bool(weight.lookups) or weight is head
            calibrated = given.get((graph, weight.name))
            usual = max(level.bits, head_bits) if is_head else level.bits
            bits[weight.name] = calibrated.bits if calibrated is not None else usual
    return bits


def _replace_by_integers(
    model: ir.Model,
    integers: Integers,
    values: NDArray[Any] | LazyMatrix,
    *,
    accuracy_level: int,
    data: DataFile,
    pieces: Pieces,
) -> None:
    """Quantize one matrix, and replace the nodes that use it by integer operators."""
    weight, level = integers.weight, integers.level
    packed, scales = data.write_once(
        weight.value.const_value,
        f"integers, {integers.form}",
        lambda: _write_quantized(integers, values, data=data, pieces=pieces),
    )
    quantized = add_initializer(model, packed)
    scale = _cast_to_float32(model, add_initializer(model, scales))
    zeros = integers.zero_points()
    zero = row_zero = None
    if zeros is not None and weight.products:
        zero = _add_array(model, f"{weight.name}.zero_point", _packed_zeros(zeros, level.bits), data=data)
    if zeros is not None and weight.lookups:
        row_zero = _add_array(model, f"{weight.name}.row_zero_point", zeros[:, :, None], data=data)
    rows, columns = weight.features
    shared = {"bits": level.bits, "block_size": level.group_size}
    for node in list(weight.products):
        attributes = {**shared, "K": columns, "N": rows, "accuracy_level": accuracy_level}
        inputs: list[ir.Value | None] = [node.inputs[0], quantized, scale, *([zero] if zero is not None else [])]
        if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
            inputs = [*inputs[:3], zero, None, node.inputs[2]]  # group indices are not used; bias
        product = ir.node("MatMulNBits", inputs, attributes, domain=_CONTRIB)
        replace_node(model.graph, node, [product])
    for node in list(weight.lookups):
        new = _lookup_nodes(model, node, (quantized, scale, row_zero), weight=weight, shared=shared)
        replace_node(model.graph, node, new)
    remove_unused(model.graph, weight.value)
    model.opset_imports[_CONTRIB] = 1


def _cast_to_float32(model: ir.Model, scales: ir.Value) -> ir.Value:
    """Return scales in the type that operators compute with; a runtime converts constants once, when it loads the graph."""
    if scales.dtype == ir.DataType.FLOAT:
        return scales
    known = next((use.node for use in scales.uses() if use.node.op_type == "Cast"), None)
    if known is None:
        known = ir.node("Cast", [scales], {"to": int(ir.DataType.FLOAT)})
        known.outputs[0].name = f"{scales.name}.float32"
        model.graph.insert_before(model.graph[0], known)
    return known.outputs[0]


def _lookup_nodes(
    model: ir.Model,
    node: ir.Node,
    parts: tuple[ir.Value, ir.Value, ir.Value | None],
    *,
    weight: Weight,
    shared: dict[str, int],
) -> list[ir.Node]:
    """Return nodes that look up rows in MatMulNBits' (N, G, group bytes) tensor and join their groups.

    MatMulNBits takes scales (N, G), GatherBlockQuantized needs scales and zero points of the data's rank. Only the small scales
    are reshaped, so that the data exists only once at run time too.
    """
    quantized, scale, zero = parts
    rows, columns = weight.features
    groups = columns // shared["block_size"]
    # Shapes must be inline: runtimes read them before external data.
    scale_shape = add_inline_constant(model, f"{weight.name}.scale_shape", [rows, groups, 1])
    row_scale = ir.node("Reshape", [scale, scale_shape])
    lookup = ir.node(
        "GatherBlockQuantized",
        [quantized, node.inputs[1], row_scale.outputs[0], *([zero] if zero is not None else [])],
        {**shared, "gather_axis": 0, "quantize_axis": 2},
        domain=_CONTRIB,
    )
    indices = node.inputs[1]
    rank = len(indices.shape) if indices is not None and indices.shape is not None else 2
    row_shape = add_inline_constant(model, f"{weight.name}.row_shape", [*([0] * rank), columns])  # 0 keeps an axis
    return [row_scale, lookup, ir.node("Reshape", [lookup.outputs[0], row_shape])]


def _write_quantized(
    integers: Integers, values: NDArray[Any] | LazyMatrix, *, data: DataFile, pieces: Pieces
) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
    """Write the matrix as integers (N, G, group bytes) and scales (N, G), a few output features at a time."""
    weight, level = integers.weight, integers.level
    rows, columns = weight.features
    groups = columns // level.group_size
    packed = data.reserve(
        f"{weight.name}.q{level.bits}", ir.DataType.UINT8, (rows, groups, level.group_size * level.bits // 8)
    )
    scales = data.reserve(f"{weight.name}.scale", ir.DataType.from_numpy(integers.scale_dtype), (rows, groups))

    def write(piece: NDArray[Any] | LazyMatrix, row: int) -> Squares:
        rounded = integers.round(np.asarray(piece), row=row)
        data.fill(packed, rounded.packed, row=row)
        data.fill(scales, rounded.scales, row=row)
        return rounded.error, rounded.energy

    for row, piece in row_chunks(values.T if weight.transposed else values, multiple=_LINE):
        pieces.add(partial(write, piece, row))
    return packed, scales


def _packed_zeros(zeros: NDArray[Any], bits: int) -> NDArray[Any]:
    """Pack unsigned zero points (N, G) as MatMulNBits takes them: (N, bytes), the first of two in the low nibble."""
    if bits == 8:
        return zeros
    even = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))
    return even[:, 0::2] | (even[:, 1::2] << 4)


def _add_array(model: ir.Model, name: str, values: NDArray[Any], *, data: DataFile) -> ir.Value:
    """Add bytes as an initializer in the data file."""
    tensor = data.reserve(name, ir.DataType.UINT8, values.shape)
    data.fill(tensor, values)
    return add_initializer(model, tensor)


def _round_in_place(integers: Integers, values: NDArray[Any] | LazyMatrix, *, data: DataFile, pieces: Pieces) -> None:
    """Replace the values of one matrix by rounded ones."""
    value = integers.weight.value
    rounded = data.write_once(
        value.const_value,
        f"values, {integers.form}",
        lambda: _write_rounded(integers, values, data=data, pieces=pieces),
    )
    bind(value, rounded)


def _write_rounded(
    integers: Integers, values: NDArray[Any] | LazyMatrix, *, data: DataFile, pieces: Pieces
) -> ir.ExternalTensor:
    """Write the rounded values of the matrix in its own layout and type."""
    weight, level = integers.weight, integers.level
    assert weight.value.const_value is not None
    shape = tuple(int(size) for size in weight.value.const_value.shape.numpy())
    dense = data.reserve(weight.name, weight.value.const_value.dtype, shape)

    def write(piece: NDArray[Any] | LazyMatrix, row: int) -> Squares:
        exact = np.asarray(piece.T if weight.transposed else piece)
        rounded = integers.round(exact, column=row) if weight.transposed else integers.round(exact, row=row)
        stored = rounded.values(level.bits)
        data.fill(dense, stored.T if weight.transposed else stored, row=row)
        return rounded.error, rounded.energy

    for row, piece in row_chunks(values, multiple=level.group_size if weight.transposed else 1):
        pieces.add(partial(write, piece, row))
    return dense
