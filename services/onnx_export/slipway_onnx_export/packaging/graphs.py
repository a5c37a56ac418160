"""Read a graph's interface, write it under a runtime's names, and join both forms of a decoder in one graph.

Most weights stay in their files.

The joined graph is ``decoder_model_merged.onnx``, as optimum and transformers.js expect it. The encoder's graph computes keys and values
of the cross-attention. The merged decoder has a copy of those nodes in one branch of an ``If``; the other branch passes on what the first
call returned. So every call returns the cache whole, and weights are not needed twice.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from slipway.model.graphs.calls import EVERY_CALL, Promise
from slipway_onnx_export.names import BRANCH, ENCODED, HIDDEN
from slipway_onnx_export.packaging.kinds import NotPackagedError

Shape = tuple[int | str, ...]
_PAGE, _SMALL = 4096, 64  # alignment of tensors that runtimes map into memory, and of those below a page
_CHUNK = 4 << 20

ENCODER_FILE, DECODER_FILE = "encoder_model.onnx", "decoder_model.onnx"
"""The graphs of an encoder-decoder: the second takes the cache of the first."""

_CACHED_AXIS = "cached_encoder_sequence"
_CROSS_PREFIX = "cross_attention/"


@dataclass(frozen=True, slots=True)
class Interface:
    """Shapes and types of a graph's inputs and outputs by name, and the calls that it takes. An axis that varies has a name."""

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    dtypes: Mapping[str, ir.DataType]
    promise: Promise = EVERY_CALL


def load_graph(folder: Path, name: str) -> ir.Model:
    """Load a graph that a stage has just written.

    Raises:
        NotPackagedError: The folder has none of this name.
    """
    if not (folder / name).is_file():
        raise NotPackagedError(f"its folder has no {name}")
    return ir.load(folder / name)


def read_interface(folder: Path, name: str) -> Interface:
    """Read the interface of a graph that a stage has just written.

    Raises:
        NotPackagedError: The folder has none of this name.
    """
    model = load_graph(folder, name)
    graph = model.graph
    return Interface(
        inputs={str(value.name): _shape(value) for value in graph.inputs},
        outputs={str(value.name): _shape(value) for value in graph.outputs},
        dtypes={str(value.name): value.dtype for value in (*graph.inputs, *graph.outputs) if value.dtype is not None},
        promise=Promise.of(model.metadata_props),
    )


def _shape(value: ir.Value) -> Shape:
    return tuple(size if isinstance(size, int) else str(size.value or "") for size in value.shape or ())


def rename_axes(model: ir.Model, names: Mapping[str, str]) -> None:
    """Give the axes of all inputs and outputs new names; ``names`` has the new name by the old one."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        sizes = (
            size if isinstance(size, int) else names.get(str(size.value), size.value) for size in value.shape or ()
        )
        value.shape = ir.Shape(list(sizes))


def save_copy(model: ir.Model, target: Path, *, own: str) -> int:
    """Write a graph with its data beside it, in ``NAME.onnx_data``, ``NAME.onnx_data_1``, ….

    The graph's own data file gets a second name, so it takes no more space. Weights in other graphs' files are copied to a new file.

    Args:
        model: The graph; its external tensors are where it was loaded from. They are bound to the new files.
        target: The copy.
        own: Name of the graph's own data file.

    Returns:
        The number of data files.
    """
    outside = [
        (value, value.const_value) for value in _initializers(model) if isinstance(value.const_value, ir.ExternalTensor)
    ]
    kept = [(value, tensor) for value, tensor in outside if str(tensor.location) == own]
    strange = [(value, tensor) for value, tensor in outside if str(tensor.location) != own]
    names = iter((f"{target.name}_data", f"{target.name}_data_1"))
    count = 0
    if kept:
        name, count = next(names), count + 1
        link(Path(kept[0][1].base_dir) / own, target.parent / name)
        for value, tensor in kept:
            _bind(value, tensor, name, int(tensor.offset or 0), target.parent)
    if strange:
        name, count = next(names), count + 1
        with (target.parent / name).open("wb") as file:
            copied: dict[tuple[str, int, int], int] = {}
            for value, tensor in strange:
                place = str(tensor.location), int(tensor.offset or 0), int(tensor.nbytes)
                if place not in copied:
                    copied[place] = _append(file, tensor)
                _bind(value, tensor, name, copied[place], target.parent)
    ir.save(model, target)
    return count


def _initializers(model: ir.Model) -> Iterator[ir.Value]:
    for graph in (model.graph, *model.graph.subgraphs()):
        yield from graph.initializers.values()


def _bind(value: ir.Value, tensor: Any, name: str, offset: int, folder: Path) -> None:
    value.const_value = ir.ExternalTensor(
        name, offset, int(tensor.nbytes), tensor.dtype, shape=tensor.shape, name=value.name or "", base_dir=str(folder)
    )


def _append(file: BinaryIO, tensor: Any) -> int:
    """Copy a tensor's bytes to the end of a file; return where they begin."""
    left = int(tensor.nbytes)
    file.seek(-file.tell() % (_PAGE if left >= _PAGE else _SMALL), os.SEEK_CUR)
    start = file.tell()
    with (Path(tensor.base_dir) / str(tensor.location)).open("rb") as source:
        source.seek(int(tensor.offset or 0))
        while left > 0:
            left -= file.write(source.read(min(left, _CHUNK)))
    return start


def link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it."""
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, target)


def load_encoder_alone(folder: Path) -> ir.Model:
    """Load the encoder with its result as its only output: the merged decoder computes the cache."""
    encoder = load_graph(folder, ENCODER_FILE)
    encoder.graph.outputs[:] = [value for value in encoder.graph.outputs if value.name == HIDDEN]
    RemoveUnusedNodesPass()(encoder)
    return encoder


def merge_decoder(folder: Path) -> ir.Model:
    """Return the decoder with the additional inputs ``encoder_hidden_states`` and ``use_cache_branch``, and the outputs ``present.N.encoder.*``.

    Raises:
        NotPackagedError: The encoder's graph has no such part that depends on its result alone.
    """
    pair = GraphPair.load(folder)
    graph, cached = pair.decoder.graph, pair.cached
    branch = ir.Value(name=BRANCH, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.BOOL))
    nodes, computed = pair.cross_attention()
    present = ir.Node(
        "", "If", [branch], num_outputs=len(cached), name=_CROSS_PREFIX + "If",
        attributes=[
            ir.AttrGraph("then_branch", _cached_branch(cached)),
            ir.AttrGraph("else_branch", ir.Graph([], computed, nodes=nodes, name="computed")),
        ],
    )  # fmt: skip
    for made, value, old in zip(present.outputs, pair.crossed, cached, strict=True):
        made.name, made.shape, made.type = value.name, value.shape, value.type
        old.shape = ir.Shape(
            [*list(old.shape or ())[:2], _CACHED_AXIS, *list(old.shape or ())[3:]]
        )  # none at the first call
        replace_uses(old, made, graph)
    graph.insert_before(graph[0], present)
    graph.inputs[:] = [*sorted(graph.inputs, key=by_layer), pair.encoded, branch]
    graph.outputs.extend(present.outputs)
    return pair.decoder


def _read_shapes_of_cast(hidden: ir.Value) -> None:
    """Make Shape nodes read the cast value: the decoder gets that value only."""
    cast = hidden.producer()
    if cast is None or cast.op_type != "Cast" or cast.inputs[0] is None:
        return
    for use in [use for use in cast.inputs[0].uses() if use.node.op_type == "Shape"]:
        use.node.replace_input_with(use.idx, hidden)


@dataclass(frozen=True)
class GraphPair:
    """An encoder and the decoder that takes its cache.

    Attributes:
        encoder: The encoder.
        decoder: The decoder. It gets the functions and constants that copied nodes of the encoder need.
        hidden: Result of the encoder.
        crossed: Outputs of the encoder with keys and values of the cross-attention.
        cached: The decoder's inputs for them.
        encoded: Additional input of the decoder for the encoder's result.
    """

    encoder: ir.Model
    decoder: ir.Model
    hidden: ir.Value
    crossed: list[ir.Value]
    cached: list[ir.Value]
    encoded: ir.Value

    @classmethod
    def load(cls, folder: Path) -> GraphPair:
        """Load the graphs of a folder.

        Raises:
            NotPackagedError: They do not fit together.
        """
        encoder, decoder = load_graph(folder, ENCODER_FILE), load_graph(folder, DECODER_FILE)
        hidden = next((value for value in encoder.graph.outputs if value.name == HIDDEN), None)
        crossed = [value for value in encoder.graph.outputs if str(value.name).startswith("present.")]
        if hidden is not None:
            _read_shapes_of_cast(hidden)
        past = {str(value.name).replace("past_key_values.", "present.", 1): value for value in decoder.graph.inputs}
        if hidden is None or not crossed or not all(value.name in past for value in crossed):
            raise NotPackagedError("its encoder and decoder do not have the interface that Slipway writes")
        for domain, version in encoder.opset_imports.items():
            if decoder.opset_imports.setdefault(domain, version) != version:
                raise NotPackagedError(
                    f"encoder and decoder have different versions of the operators {domain or 'ai.onnx'}"
                )
        decoder.functions.update(encoder.functions)
        encoded = ir.Value(name=ENCODED, shape=hidden.shape, type=hidden.type)
        return cls(encoder, decoder, hidden, crossed, [past[str(value.name)] for value in crossed], encoded)

    def cross_attention(self) -> tuple[list[ir.Node], list[ir.Value]]:
        """Copy the nodes between the encoder's result and the cross-attention's cache; their constants go to the decoder.

        Returns:
            The copies, which read :attr:`encoded`, and their values of :attr:`crossed`.

        Raises:
            NotPackagedError: The cache depends on more than the encoder's result.
        """
        needed = _nodes_between(self.hidden, self.crossed)
        inputs = set(self.encoder.graph.inputs)
        copies: dict[ir.Value, ir.Value] = {self.hidden: self.encoded}
        nodes = []
        for node in (node for node in self.encoder.graph if node in needed):
            for value in filter(None, node.inputs):
                if value in inputs:
                    # Only its rows and length are read, and the encoder's result has the same.
                    copies[value] = self.encoded
                elif value.is_initializer() and value not in copies:
                    copies[value] = _copy_constant(value, self.decoder.graph)
            copy = ir.Node(
                node.domain, node.op_type, [None if value is None else copies[value] for value in node.inputs],
                list(node.attributes.values()), overload=node.overload, num_outputs=len(node.outputs),
                name=f"{_CROSS_PREFIX}{node.name}",
            )  # fmt: skip
            for new, old in zip(copy.outputs, node.outputs, strict=True):
                new.name, new.shape, new.type, copies[old] = f"{_CROSS_PREFIX}{old.name}", old.shape, old.type, new
            nodes.append(copy)
        return nodes, [copies[value] for value in self.crossed]


def by_layer(value: ir.Value) -> tuple[int, str]:
    """Return the sort key of an input or output: optimum passes the cache by order, in each layer the decoder's, then the encoder's."""
    part = re.match(r"(?:past_key_values|present)\.(\d+)\.(.*)", str(value.name))
    return (int(part[1]), part[2]) if part else (-1, "")


def replace_uses(old: ir.Value, new: ir.Value, graph: ir.Graph) -> None:
    """Make the nodes of a graph, but not those of its subgraphs, read ``new`` instead of ``old``."""
    for use in [use for use in old.uses() if use.node.graph is graph]:
        use.node.replace_input_with(use.idx, new)


def _cached_branch(cached: list[ir.Value]) -> ir.Graph:
    nodes = [ir.Node("", "Identity", [value]) for value in cached]
    for node, value in zip(nodes, cached, strict=True):
        node.outputs[0].name, node.outputs[0].type = f"{_CROSS_PREFIX}{value.name}", value.type
    return ir.Graph([], [node.outputs[0] for node in nodes], nodes=nodes, name="cached")


def _nodes_between(start: ir.Value, ends: list[ir.Value]) -> set[ir.Node]:
    nodes: set[ir.Node] = set()
    waiting = [value.producer() for value in ends]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        for value in filter(None, node.inputs):
            if value.is_graph_input() and not _reads_rows_or_length(node):
                raise NotPackagedError(
                    f"its cross-attention depends on the encoder's input {value.name}, not on the encoder's result alone"
                )
            if value is not start:
                waiting.append(value.producer())
    return nodes


def _reads_rows_or_length(node: ir.Node) -> bool:
    end = node.attributes.get_int("end", None)
    return node.op_type == "Shape" and (node.attributes.get_int("start", 0), end) in ((0, 1), (1, 2), (0, 2))


def _copy_constant(value: ir.Value, target: ir.Graph) -> ir.Value:
    copy = ir.Value(
        name=f"{_CROSS_PREFIX}{value.name}", shape=value.shape, type=value.type, const_value=value.const_value
    )
    target.register_initializer(copy)
    return copy
