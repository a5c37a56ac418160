"""Give a graph the requested form for serving: joined projections, logits of the last token only, approximate GELUs.

Linear layers that read the same values are joined: queries, keys and values, and the two halves of a gated network. One large product
uses the memory's bandwidth better than two or three small ones, and quantizes its input once.

With logits of each row's last token only, as ``logits_to_keep=1`` of transformers gives them, a prompt costs one row of the
largest matrix instead of one per token. ONNX Runtime's own passes replace exact GELUs by its faster approximation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch

from slipway.errors import ONNXExportError
from slipway.model.families import DECODER
from slipway.model.graphs.calls import EVERY_CALL, Promise
from slipway_onnx_export.interface import Component, EngineGraph
from slipway_onnx_export.ir_graphs import add_constant
from slipway_onnx_export.loading.conversion import Stack, Weight
from slipway_onnx_export.names import IDS, LOGITS, MASK, POSITIONS
from slipway_onnx_export.serving.shared_buffer import CONTRIB, OPERATOR
from slipway_onnx_export.source import ModelSource
from slipway_onnx_export.writing.graph import TRANSPOSED_SUFFIX

_AFTER_THE_HEAD = frozenset({"Add", "Mul", "Div", "Tanh", "Cast", "Identity", "Sub", "Where", "Clip"})
"""Operators that may change the head's results one by one (bias, scale, soft capping)."""

_DOMAIN, _APPROXIMATE = "com.microsoft", "FastGelu"

_MOST_JOINED = 3
"""Most layers that are joined: more that read the same values are experts."""


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


@dataclass(frozen=True)
class Columns(Stack):
    """Linear layers side by side: their weights, each (out, in), are joined to (in, outs) when they are read."""

    @property
    def shape(self) -> torch.Size:
        """Return (in, outs)."""
        (parts,) = self.parts
        whole = parts[0].shape[1], sum(len(part) for part in parts)
        return torch.Size(whole[::-1] if self.swapped else whole)

    def dim(self) -> int:
        """Return the number of axes."""
        return 2

    def permute(self, perm: tuple[int, ...]) -> Stack:
        """Return the layers with rows and columns exchanged."""
        assert perm == (1, 0)
        return replace(self, swapped=not self.swapped)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Join some rows."""
        (parts,) = self.parts
        return torch.cat(parts)[rows] if self.swapped else torch.cat([part[:, rows] for part in parts]).T


def join_projections(graph: ir.Graph, weights: dict[str, Weight]) -> None:
    """Join linear layers in place; ``weights`` has the tensor of each initializer without a value, and gets the joined ones."""
    for nodes in list(_layers_to_join(graph, weights)):
        names = [str(node.inputs[1].name) for node in nodes if node.inputs[1] is not None]
        parts = [weights.pop(name) for name in names]
        assert all(isinstance(part, torch.Tensor) for part in parts)
        joined = Columns((tuple(part.T for part in parts if isinstance(part, torch.Tensor)),))
        for node, own in zip(nodes, names, strict=True):
            node.replace_input_with(1, None)
            del graph.initializers[own]
        name = _joined_name(names)
        value = ir.Value(name=name, shape=ir.Shape(joined.shape), type=ir.TensorType(ir.DataType.FLOAT))
        graph.initializers[name] = value
        weights[name] = joined
        _replace_by_product(graph, nodes, value, [len(part) for part in joined.parts[0]])


def _layers_to_join(graph: ir.Graph, weights: dict[str, Weight]) -> Iterator[list[ir.Node]]:
    """Yield the groups of two or three linear layers that read the same value."""
    readers: dict[int, list[ir.Node]] = {}
    for node in graph:
        weight = node.inputs[1] if node.op_type == "MatMul" and not node.domain else None
        tensor = weights.get(str(weight.name)) if weight is not None and len(weight.uses()) == 1 else None
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 2:
            readers.setdefault(id(node.inputs[0]), []).append(node)
    yield from (nodes for nodes in readers.values() if 1 < len(nodes) <= _MOST_JOINED)


def _replace_by_product(graph: ir.Graph, nodes: list[ir.Node], weight: ir.Value, sizes: list[int]) -> None:
    """Replace linear layers by one product and a split. Attention that reads all parts in order takes the product whole."""
    product = ir.node("MatMul", [nodes[0].inputs[0], weight])
    product.name = product.outputs[0].name = f"{weight.name}.product"
    first = nodes[0].outputs[0]
    if first.shape is not None and len(first.shape):
        product.outputs[0].shape = ir.Shape([*first.shape[:-1], sum(sizes)])
        product.outputs[0].type = first.type
    users = {id(user): user for node in nodes for user in node.outputs[0].consumers()}
    reader = next(iter(users.values())) if len(users) == 1 else None
    steps = [product]
    whole = [node.outputs[0] for node in nodes]
    if reader is not None and (reader.domain, reader.op_type) == (CONTRIB, OPERATOR) and [*reader.inputs[:3]] == whole:
        graph.insert_before(nodes[0], steps)
        reader.replace_input_with(0, product.outputs[0])
        reader.replace_input_with(1, None)
        reader.replace_input_with(2, None)
    else:
        constant = add_constant(graph, f"{weight.name}.sizes", np.array(sizes, np.int64))
        split = ir.node("Split", [product.outputs[0], constant], {"axis": -1}, num_outputs=len(nodes))
        split.name = f"{weight.name}.split"
        graph.insert_before(nodes[0], [*steps, split])
        for node, output in zip(nodes, split.outputs, strict=True):
            old = node.outputs[0]
            output.name, output.shape, output.type = f"{old.name}.part", old.shape, old.type
            old.replace_all_uses_with(output)
    for node in nodes:
        graph.remove(node, safe=True)


def _joined_name(names: list[str]) -> str:
    """Name a joined weight after its parts: ``layers.0.q_proj.weight.T`` and its neighbours give ``layers.0.q_proj+k_proj+v_proj.weight.T``."""
    paths = [name.removesuffix(TRANSPOSED_SUFFIX).removesuffix(".weight").rpartition(".") for name in names]
    return f"{paths[0][0]}.{'+'.join(last for _, _, last in paths)}.weight{TRANSPOSED_SUFFIX}"
