"""Join linear layers that read the same values into one: queries, keys and values, and the two halves of a gated network.

One large product uses the memory's bandwidth better than two or three small ones, and quantizes its input once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import torch

from slipway_onnx_export.constants import add_constant
from slipway_onnx_export.loading.conversion import Stack, Weight
from slipway_onnx_export.serving.shared_buffer import CONTRIB, OPERATOR
from slipway_onnx_export.writing.graph import TRANSPOSED_SUFFIX

_MOST = 3
"""Most layers that are joined: more that read the same values are experts."""


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
    for nodes in list(_groups(graph, weights)):
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
        _replace(graph, nodes, value, [len(part) for part in joined.parts[0]])


def _groups(graph: ir.Graph, weights: dict[str, Weight]) -> Iterator[list[ir.Node]]:
    """Yield the groups of two or three linear layers that read the same value."""
    readers: dict[int, list[ir.Node]] = {}
    for node in graph:
        weight = node.inputs[1] if node.op_type == "MatMul" and not node.domain else None
        tensor = weights.get(str(weight.name)) if weight is not None and len(weight.uses()) == 1 else None
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 2:
            readers.setdefault(id(node.inputs[0]), []).append(node)
    yield from (nodes for nodes in readers.values() if 1 < len(nodes) <= _MOST)


def _replace(graph: ir.Graph, nodes: list[ir.Node], weight: ir.Value, sizes: list[int]) -> None:
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
