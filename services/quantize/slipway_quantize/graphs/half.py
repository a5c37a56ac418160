"""Write ONNX graphs in fp16 or bf16: weights, KV cache and results in half precision, sensitive operations in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from slipway.stage import Context
from slipway_quantize.graphs.folder import (
    DataFile,
    Shared,
    add_initializer,
    copy_external,
    graph_files,
    load_graph,
    read_constant,
    row_chunks,
    save_graph,
)
from slipway_quantize.graphs.left_out import LeftOutSource
from slipway_quantize.graphs.precision import HalfPlan, float_inputs, is_float, plan_half
from slipway_quantize.model_weights import as_array, cast_to_half
from slipway_quantize.report import Outcome

_INLINE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Half:
    """A type of 16 bits.

    Attributes:
        level: Name of the level; also the end of the names of values in this type.
        dtype: In graphs.
        torch: In torch.
    """

    level: str
    dtype: ir.DataType
    torch: torch.dtype

    @property
    def name(self) -> str:
        """Return the name of the type."""
        return str(self.torch).removeprefix("torch.")


HALVES = {
    each.level: each
    for each in (
        Half("fp16", ir.DataType.FLOAT16, torch.float16),
        Half("bf16", ir.DataType.BFLOAT16, torch.bfloat16),
    )
}
"""By level."""


def half_values(model: ir.Model) -> list[str]:
    """Return the names of the values that nodes compute in float16 if all fit; declare the types of all values.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED`` for graphs with branches or loops.
    """
    _infer_types(model)
    plan = plan_half(model.graph)
    values = [value for node in model.graph for value in node.outputs if value.name and is_float(value)]
    return [str(value.name) for value in values if id(value) in plan.half]


def write_half(
    source: Path,
    target: Path,
    *,
    left_out: LeftOutSource,
    ctx: Context,
    wide: Mapping[str, float] = MappingProxyType({}),
    half: Half = HALVES["fp16"],
) -> Outcome:
    """Write ``source``'s graphs into ``target`` in a type of 16 bits, which float32 inputs and outputs get too.

    Args:
        source: The folder.
        target: Receives the graphs.
        left_out: Weights that the graphs leave out.
        ctx: Context of the stage.
        wide: Values that float16 cannot hold, with their largest magnitude; nodes that make or read them stay float32.
        half: The type.

    Raises:
        QuantizationError: ``ONNX_INVALID``, ``NON_FINITE_WEIGHTS``, ``WEIGHT_OVERFLOW``, or ``QUANTIZATION_UNSUPPORTED``
            for graphs with branches or loops.
    """
    outcome = Outcome(method=f"{half.name} with float32 norms, angles and softmax")
    shared = Shared()
    for name in graph_files(source):
        model = load_graph(source, name)
        outcome.left_out_bytes += left_out.put_in(model, name)
        _infer_types(model)
        plan = plan_half(model.graph, wide=wide)
        outcome.kept |= _wide_weights(model.graph, plan, wide)
        with DataFile(target, name, shared) as data:
            weights = _HalfWeights(source, model, data, outcome, ctx, half=half)
            casts = _Casts(model.graph, half)
            for node in list(model.graph):
                if node.op_type == "Constant" and node.domain == "":
                    continue
                wanted = plan.wants_half(node)
                for index, value in list(float_inputs(node)):
                    node.replace_input_with(
                        index, _cast_value(value, half=wanted, plan=plan, weights=weights, casts=casts)
                    )
            _convert_interface(model.graph, plan, casts)
            _declare_types(model.graph, plan, half)
            weights.drop_unused()
            copy_external(source, model, data)
            weights.finish()
        save_graph(model, target, name)
    return outcome


def _wide_weights(graph: ir.Graph, plan: HalfPlan, wide: Mapping[str, float]) -> dict[str, str]:
    """Return the weights that stay float32 because float16 cannot hold their node's values, with the reason."""
    kept: dict[str, str] = {}
    for node in graph:
        beyond = [value for value in (*node.inputs, *node.outputs) if value is not None and value.name in wide]
        for value in node.inputs if beyond else ():
            if value is not None and value.is_initializer() and id(value) in plan.constants and is_float(value):
                largest = max(wide[str(each.name)] for each in beyond)
                kept[str(value.name)] = (
                    f"its layer's activations reach {largest:.5g} on text, near the end of float16's range"
                )
    return kept


class _HalfWeights:
    """Initializers in half precision, each written once, when it is first used."""

    def __init__(
        self, source: Path, model: ir.Model, data: DataFile, outcome: Outcome, ctx: Context, *, half: Half
    ) -> None:
        self._half = half
        self._source, self._model, self._data, self._outcome, self._ctx = source, model, data, outcome, ctx
        self._made: dict[int, ir.Value] = {}
        self._converted: list[ir.Value] = []
        self._total = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
        self._done = 0

    def get(self, value: ir.Value) -> ir.Value:
        if id(value) not in self._made:
            self._ctx.progress("cast", done=self._done, total=self._total)
            self._made[id(value)] = add_initializer(self._model, self._convert(value))
            self._converted.append(value)
            self._done += value.const_value.nbytes if value.const_value is not None else 0
        return self._made[id(value)]

    def finish(self) -> None:
        """Report that every weight is written."""
        self._ctx.progress("cast", done=self._total, total=self._total)

    def drop_unused(self) -> None:
        """Remove the float32 originals that are no longer used; keep the others beside their copies."""
        for value in self._converted:
            assert value.name is not None
            if value.uses():
                self._outcome.kept[value.name] = f"also used where {self._half.name} is not precise enough"
            else:
                del self._model.graph.initializers[value.name]
            self._outcome.quantized.append(value.name)

    def _convert(self, value: ir.Value) -> Any:
        assert value.name is not None
        name = f"{value.name}.{self._half.level}"
        values = read_constant(self._source, value.const_value)
        if 4 * values.size <= _INLINE_BYTES:
            return ir.tensor(_cast_small(np.array(values, np.float32), value.name, self._half), name=name)
        return self._data.write_once(value.const_value, self._half.level, lambda: self._write(name, values))

    def _write(self, name: str, values: Any) -> ir.ExternalTensor:
        stored = self._data.reserve(name, self._half.dtype, values.shape)
        for row, rows in row_chunks(values):
            cast = cast_to_half(torch.from_numpy(np.array(rows, np.float32)), self._half.torch, name)
            self._data.fill(stored, as_array(cast), row=row)
        return stored


class _Casts:
    """Casts between the two precisions, one per value and direction."""

    def __init__(self, graph: ir.Graph, half: Half) -> None:
        self._graph, self._half = graph, half
        self._made: dict[tuple[int, bool], ir.Value] = {}

    def get(self, value: ir.Value, *, half: bool) -> ir.Value:
        key = (id(value), half)
        if key not in self._made:
            dtype = self._half.dtype if half else ir.DataType.FLOAT
            cast = ir.node("Cast", [value], {"to": int(dtype)})
            cast.outputs[0].type = ir.TensorType(dtype)
            cast.outputs[0].shape = value.shape
            cast.outputs[0].name = f"{value.name}.{self._half.level if half else 'fp32'}"
            producer = value.producer()
            if producer is None:
                self._graph.insert_before(self._graph[0], cast)
            else:
                self._graph.insert_after(producer, cast)
            self._made[key] = cast.outputs[0]
        return self._made[key]


def _cast_value(value: ir.Value, *, half: bool, plan: HalfPlan, weights: _HalfWeights, casts: _Casts) -> ir.Value:
    """Return ``value`` in the precision that a node needs."""
    if id(value) in plan.constants:
        if not half:
            return value
        return weights.get(value) if value.is_initializer() else casts.get(value, half=True)
    return value if (id(value) in plan.half) == half else casts.get(value, half=half)


def _convert_interface(graph: ir.Graph, plan: HalfPlan, casts: _Casts) -> None:
    """Make every float output half precision; if its value is computed in float32, a cast is added and takes its name."""
    for index, value in enumerate(graph.outputs):
        if is_float(value) and id(value) not in plan.half:
            name = value.name
            cast = casts.get(value, half=True)
            value.name, cast.name = f"{name}.fp32", name
            graph.outputs[index] = cast


def _declare_types(graph: ir.Graph, plan: HalfPlan, half: Half) -> None:
    declared = ir.TensorType(half.dtype)
    for value in graph.inputs:
        if id(value) in plan.half:
            value.type = declared
    for node in graph:
        for value in node.outputs:
            if id(value) in plan.half and is_float(value):
                value.type = declared


def _cast_small(values: Any, name: str, half: Half) -> Any:
    """Convert a small constant; a single number beyond the type's range, such as a mask's lowest value, is clipped."""
    if values.size == 1:
        largest = float(torch.finfo(half.torch).max)
        clipped = np.where(np.isfinite(values), np.clip(values, -largest, largest), values)
        return as_array(torch.from_numpy(clipped.astype(np.float32)).to(half.torch))
    return as_array(cast_to_half(torch.from_numpy(values), half.torch, name))


def _infer_types(model: ir.Model) -> None:
    """Declare the type of every value that a node computes; weights are not touched.

    ONNX's own inference does not know the operators of ONNX Runtime: their outputs get the type of the first input.
    """
    from onnx_ir.passes.common import ShapeInferencePass

    ShapeInferencePass()(model)
    for node in model.graph:
        for value in node.outputs:
            if value.type is None and value.name:
                value.type = next((known.type for known in node.inputs if known is not None and known.type), None)
