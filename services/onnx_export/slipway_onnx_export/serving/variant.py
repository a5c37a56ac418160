"""Give a graph the requested form for serving: logits of the last token only, and approximate GELUs.

With logits of each row's last token only, as ``logits_to_keep=1`` of transformers gives them, a prompt costs one row of the
largest matrix instead of one per token. ONNX Runtime's own passes replace exact GELUs by its faster approximation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from slipway.errors import ONNXExportError
from slipway.model.families import DECODER
from slipway.model.graphs.promise import EVERY_CALL, Promise
from slipway_onnx_export.constants import add_constant
from slipway_onnx_export.engine_graph import EngineGraph
from slipway_onnx_export.interface import Component
from slipway_onnx_export.loading.conversion import Weight
from slipway_onnx_export.names import IDS, LOGITS, MASK, POSITIONS
from slipway_onnx_export.serving.projections import join_projections
from slipway_onnx_export.serving.shared_buffer import OPERATOR
from slipway_onnx_export.source import ModelSource

_AFTER_THE_HEAD = frozenset({"Add", "Mul", "Div", "Tanh", "Cast", "Identity", "Sub", "Where", "Clip"})
"""Operators that may change the head's results one by one (bias, scale, soft capping)."""

_DOMAIN, _APPROXIMATE = "com.microsoft", "FastGelu"


def check_family(source: ModelSource, promise: Promise) -> None:
    """Check that a model's family can have a form for serving.

    Raises:
        ONNXExportError: ``OPERATOR_UNSUPPORTED``.
    """
    if source.family is not DECODER and promise != EVERY_CALL:
        raise ONNXExportError(
            f"the model's family is {source.family.name}, and only decoders have a form for serving",
            reason="OPERATOR_UNSUPPORTED",
            remedy="set past_present_share_buffer to false and logits_to_keep to 0",
            about={"operator": OPERATOR if promise.shared_buffer else "MatMul"},
        )


def serve(made: EngineGraph, weights: dict[str, Weight], promise: Promise) -> EngineGraph:
    """Return a normalized graph in the form for serving; graph and weights are changed in place.

    Raises:
        ONNXExportError: ``OPERATOR_UNSUPPORTED`` if the graph has no such form.
    """
    if promise.shared_buffer:
        join_projections(made.model.graph, weights)
    if promise.last_logits:
        keep_last_logits(made.model.graph)
    takes_positions = any(value.name == POSITIONS for value in made.model.graph.inputs)
    return replace(made, component=_component(made.component, promise, takes_positions=takes_positions))


def _component(component: Component, promise: Promise, *, takes_positions: bool) -> Component:
    inputs, outputs = component.inputs, component.outputs
    if promise.shared_buffer and not takes_positions:
        inputs = tuple(port for port in inputs if port.name != POSITIONS)
    if promise.last_logits:
        outputs = tuple(
            replace(port, shape=(port.shape[0], 1, *port.shape[2:])) if port.name == LOGITS else port
            for port in outputs
        )
    return replace(component, inputs=inputs, outputs=outputs, promise=promise)


def keep_last_logits(graph: ir.Graph) -> None:
    """Select the last token of each row before the language model head, in place.

    Raises:
        ONNXExportError: ``OPERATOR_UNSUPPORTED`` if the head is not found.
    """
    inputs = {value.name: value for value in graph.inputs}
    head = _head(next(value for value in graph.outputs if value.name == LOGITS))
    if head is None or IDS not in inputs or MASK not in inputs:
        raise ONNXExportError(
            "the head of this model was not found in its graph, so logits of all tokens cannot be left out",
            reason="OPERATOR_UNSUPPORTED",
            remedy="set logits_to_keep to 0",
            about={"operator": "MatMul"},
        )
    hidden = head.inputs[0]
    steps: list[ir.Node] = []

    def op(kind: str, *values: ir.Value | None, **attributes: int) -> ir.Value:
        steps.append(node := ir.node(kind, list(values), attributes))
        node.name = node.outputs[0].name = f"last.{kind}.{len(steps)}"
        return node.outputs[0]

    def ints(*values: int) -> ir.Value:
        name = "last." + "_".join(map(str, values))
        return graph.initializers.get(name) or add_constant(graph, name, np.array(values, np.int64))

    # The last token that is no padding: its place among the new tokens, (batch, 1).
    new = op("Slice", op("Shape", inputs[IDS]), ints(1), ints(2))
    mask = op("Slice", inputs[MASK], op("Neg", new), ints(np.iinfo(np.int64).max), ints(1))
    last = op("ArgMax", op("Cast", mask, to=int(ir.DataType.INT32)), axis=1, keepdims=1, select_last_index=1)
    kept = op("Unsqueeze", op("GatherND", hidden, last, batch_dims=1), ints(1))  # (batch, 1, width)
    graph.insert_before(head, steps)
    head.replace_input_with(0, kept)
    for node in _nodes_from(head):
        for value in node.outputs:
            if value.shape is not None and len(value.shape) == 3:
                value.shape = ir.Shape([value.shape[0], 1, value.shape[2]])


def _head(value: ir.Value) -> ir.Node | None:
    """Return the product that the logits come from, whose first operand is the hidden state of each token."""
    while (node := value.producer()) is not None and node.op_type in _AFTER_THE_HEAD:
        computed = [each for each in node.inputs if each is not None and each.producer() is not None]
        if len(computed) != 1:
            return None
        value = computed[0]
    return node if node is not None and node.op_type == "MatMul" else None


def _nodes_from(head: ir.Node) -> list[ir.Node]:
    """Return the head and the nodes behind it."""
    nodes = [head]
    for node in nodes:
        nodes += [user for output in node.outputs for user in output.consumers()]
    return nodes


def approximate_gelu(files: Sequence[Path]) -> int:
    """Approximate the GELUs of graphs in their files, and return their number. Weights stay where they are.

    ``FastGelu`` computes 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), which differs from the exact function by 5e-4 at most.
    """
    count = 0
    for path in files:
        graph = onnx.load(path, load_external_data=False)
        replaced = _approximate(graph)
        if replaced:
            onnx.save(graph, path)
        count += replaced
    return count


def _approximate(graph: onnx.ModelProto) -> int:
    with _put_tools_on_path():
        from onnxruntime.transformers.fusion_gelu import FusionGelu
        from onnxruntime.transformers.fusion_gelu_approximation import FusionGeluApproximation
        from onnxruntime.transformers.onnx_model import OnnxModel

        before = _count(graph)
        model = OnnxModel(graph)
        FusionGelu(model).apply()  # an older opset writes it with several operators
        FusionGeluApproximation(model).apply()
        model.topological_sort()
    added = _count(graph) - before
    if added and all(each.domain != _DOMAIN for each in graph.opset_import):
        graph.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    return added


def _count(graph: onnx.ModelProto) -> int:
    return sum(node.op_type == _APPROXIMATE for node in graph.graph.node)


@contextmanager
def _put_tools_on_path() -> Iterator[None]:
    """Put the folder of ONNX Runtime's tools on the import path for a while: they import each other as if it were there."""
    before = list(sys.path)
    try:
        sys.path.append(str(Path(onnxruntime.__file__).parent / "transformers"))
        yield
    finally:
        sys.path[:] = before
