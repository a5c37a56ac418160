"""A folder as optimum's classes load it: ``ORTModelForCausalLM``, ``ORTModelForSeq2SeqLM`` and those of encoders (optimum-onnx 0.1).

An encoder-decoder has three graphs: the encoder, the decoder of the first step, which takes no cache and returns that of the
cross-attention too, and the decoder of further steps. The first two are made of the encoder and the decoder that Slipway writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from slipway.model.families import DECODER
from slipway.model.model_files import copy_companions
from slipway_onnx_export.ir_graphs import add_constant
from slipway_onnx_export.names import ENCODED
from slipway_onnx_export.packaging.graphs import (
    DECODER_FILE,
    ENCODER_FILE,
    GraphPair,
    by_layer,
    link,
    load_encoder_alone,
    load_graph,
    rename_axes,
    replace_uses,
)
from slipway_onnx_export.packaging.kinds import NotPackagedError, Packaged
from slipway_onnx_export.packaging.states import states_by_layer

FOLDER = "optimum"
WITH_PAST = "decoder_with_past_model.onnx"

_AXES = {"batch": "batch_size", "sequence": "sequence_length", "encoder_sequence": "encoder_sequence_length"}
_OWN_HEADS = ("past_heads", "past_size")


def write_optimum(model: Packaged) -> str:
    """Write the folder ``optimum``; return its name. The data files are second names of those beside it.

    Raises:
        NotPackagedError: The graphs have a form that optimum's classes do not run.
    """
    graphs = dict(_graphs(model))
    root = model.folder / FOLDER
    root.mkdir()
    copy_companions(model.folder, root)
    for data in sorted(model.folder.glob("*.onnx.data")):
        link(data, root / data.name)
    for name, graph in graphs.items():
        rename_axes(graph, _AXES)
        ir.save(graph, root / name)
    return FOLDER


def _graphs(model: Packaged) -> Iterator[tuple[str, ir.Model]]:
    if model.family is DECODER:
        decoder = load_graph(model.folder, "model.onnx")
        take_any_empty_cache(decoder)
        yield "model.onnx", decoder
    elif not model.family.generates:
        yield "model.onnx", load_graph(model.folder, "model.onnx")
    else:
        yield ENCODER_FILE, load_encoder_alone(model.folder)
        whole = load_graph(model.folder, DECODER_FILE)
        if any(value.name == ENCODED for value in whole.graph.inputs):  # without a cache, optimum takes it as it is
            yield DECODER_FILE, whole
            return
        whole.graph.inputs[:] = sorted(whole.graph.inputs, key=by_layer)
        yield DECODER_FILE, first_decoder(model.folder)
        yield WITH_PAST, whole


def first_decoder(folder: Path) -> ir.Model:
    """Return the decoder of the first step: it takes the encoder's result instead of a cache, and returns the whole cache.

    Raises:
        NotPackagedError: The cache of the cross-attention does not follow from the encoder's result alone.
    """
    pair = GraphPair.load(folder)
    graph = pair.decoder.graph
    nodes, computed = pair.cross_attention()
    for value, made, old in zip(pair.crossed, computed, pair.cached, strict=True):
        made.name, made.shape, made.type = value.name, value.shape, value.type
        replace_uses(old, made, graph)
    own = [value for value in graph.inputs if str(value.name).startswith("past_") and value not in pair.cached]
    graph.insert_before(graph[0], [*_replace_by_empty(own, graph), *nodes])
    dropped = {*own, *pair.cached}
    graph.inputs[:] = [*(value for value in graph.inputs if value not in dropped), pair.encoded]
    graph.outputs[:] = sorted((*graph.outputs, *computed), key=by_layer)
    return pair.decoder


def _replace_by_empty(past: list[ir.Value], graph: ir.Graph) -> Iterator[ir.Node]:
    """Replace inputs by empty caches of as many rows as there are texts; yield the nodes that make them."""
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    shape = ir.node("Shape", [ids], name="empty/shape")
    rows = ir.node("Gather", [shape.outputs[0], _constant(graph, "empty/first", [0])], name="empty/rows")
    yield shape
    yield rows
    for value in past:
        sizes = list(value.shape or ())
        rest = _constant(graph, f"empty/{value.name}/sizes", [_require_fixed(sizes[1]), 0, _require_fixed(sizes[3])])
        whole = ir.node("Concat", [rows.outputs[0], rest], {"axis": 0}, name=f"empty/{value.name}/shape")
        zero = ir.tensor(np.zeros(1, value.dtype.numpy() if value.dtype else np.float32))
        made = ir.node("ConstantOfShape", [whole.outputs[0]], {"value": zero}, name=f"empty/{value.name}")
        made.outputs[0].shape, made.outputs[0].type = ir.Shape([sizes[0], sizes[1], 0, sizes[3]]), value.type
        replace_uses(value, made.outputs[0], graph)
        yield whole
        yield made


def take_any_empty_cache(model: ir.Model) -> None:
    """Make a decoder take an empty cache of any heads and size, in place.

    optimum computes them from ``config.json`` in ways that are wrong for models such as Qwen3, whose heads are not as wide as
    ``hidden_size / num_attention_heads``. A reshape changes no other cache.

    Raises:
        NotPackagedError: The cache has a fixed length, or states beside keys and values.
    """
    graph = model.graph
    past = [value for value in graph.inputs if str(value.name).startswith("past_key_values.")]
    if states_by_layer(str(value.name) for value in past):
        raise NotPackagedError("optimum's classes have keys and values in their cache, and no states")
    shapes: dict[tuple[int, int], ir.Value] = {}
    nodes: list[ir.Node] = []

    def add(kind: str, inputs: list[ir.Value], **attributes: Any) -> ir.Value:
        nodes.append(ir.node(kind, inputs, attributes, name=f"cache/{len(nodes)}"))
        nodes[-1].outputs[0].name = f"cache/value_{len(nodes)}"
        return nodes[-1].outputs[0]

    for value in past:
        sizes = list(value.shape or ())
        if isinstance(sizes[2], int):
            raise NotPackagedError("optimum's classes have no cache of a fixed length")
        heads, width = _require_fixed(sizes[1]), _require_fixed(sizes[3])
        if (heads, width) not in shapes:
            shape = add("Shape", [value])
            rows, length = (
                add("Gather", [shape, _constant(graph, f"cache/{heads}/{width}/{axis}", [axis])]) for axis in (0, 2)
            )
            last = [
                _constant(graph, f"cache/{heads}/{width}/size_{axis}", [size])
                for axis, size in ((1, heads), (3, width))
            ]
            shapes[heads, width] = add("Concat", [rows, last[0], length, last[1]], axis=0)
        users = list(value.uses())
        reshaped = add("Reshape", [value, shapes[heads, width]], allowzero=1)
        reshaped.shape, reshaped.type = value.shape, value.type
        for use in users:
            if use.node not in nodes:
                use.node.replace_input_with(use.idx, reshaped)
        value.shape = ir.Shape([sizes[0], _OWN_HEADS[0], sizes[2], _OWN_HEADS[1]])
    if nodes:
        graph.insert_before(graph[0], nodes)


def _require_fixed(size: Any) -> int:
    if not isinstance(size, int):
        raise NotPackagedError("its graph does not state the heads of its cache")
    return size


def _constant(graph: ir.Graph, name: str, values: list[int]) -> ir.Value:
    return add_constant(graph, name, np.array(values, np.int64))
