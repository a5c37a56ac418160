"""Rewrite a decoder's attention so that past and present keys and values may be one buffer.

``GroupQueryAttention`` of ONNX Runtime rotates queries and keys, and writes new keys and values behind the old ones in place. It
counts the tokens of a row by the sum of its mask, so this rewriting is right for rows that are padded on the right.

By computing it, a mask is found to hide padding, later tokens and those before a window, and nothing else.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes.common import RemoveUnusedNodesPass

from slipway.errors import ONNXExportError
from slipway.proof.onnx_errors import ORT_ERRORS
from slipway_onnx_export.ir_graphs import add_constant
from slipway_onnx_export.names import IDS, MASK, POSITIONS
from slipway_onnx_export.parity.rows import Array
from slipway_onnx_export.source import WINDOW_LIMIT

CONTRIB = "com.microsoft"
OPERATOR = "GroupQueryAttention"

_Masking = tuple[ir.Value | None, bool]
"""Mask of an attention, and whether the operator hides later tokens."""

_ROTARY_MULTIPLE = 16
"""The operator rotates heads whose size is a multiple of this."""

_FAR = 2 * WINDOW_LIMIT
"""Tokens of the longest sample: beyond each window that engines build."""

_SAMPLES = (
    (3, [[1, 1, 1], [1, 0, 0]]),
    (1, [[1, 1, 1, 1, 1], [1, 1, 0, 0, 1]]),
    (2, [[1] * _FAR]),
)
"""New tokens, and the mask of all tokens: a prompt, a token after it, and tokens far from the first."""

_HIDDEN = -1000.0
"""A mask hides a token if it adds less than this to its score."""


def share_buffers(model: ir.Model, *, window: int = 0, dropped: int = 0) -> None:
    """Replace every ``Attention`` by ``GroupQueryAttention``, in place; rotary embeddings go into it where it can rotate.

    Args:
        model: The decoder.
        window: Sliding window in the mask of its local layers; 0 for none.
        dropped: Window of all layers that the graph lacks; 0 for none.

    Raises:
        ONNXExportError: ``OPERATOR_UNSUPPORTED`` if the operator would compute something else, with the reason.
    """
    graph = model.graph
    nodes = [node for node in graph if node.op_type == "Attention" and not node.domain]
    if not nodes:
        raise _unsupported_error("its graph has no Attention operators")
    windows: dict[_Masking, int] = {}
    for mask, causal in {_masking_of(node) for node in nodes}:
        size = None if mask is None else window_of(graph, mask, causal=causal, window=window)
        if size is None:
            raise _unsupported_error(
                "its attention is not causal attention with a mask of padding alone, or of padding and a window"
            )
        windows[mask, causal] = size or dropped
    lengths = _count_tokens(graph)
    for node in nodes:
        new = _make_grouped(node, lengths, windows[_masking_of(node)])
        ir.convenience.replace_nodes_and_values(graph, node, [node], [new], node.outputs[:3], new.outputs)
    graph.opset_imports[CONTRIB] = 1
    RemoveUnusedNodesPass()(model)
    for value in [value for value in graph.inputs if value.name == POSITIONS and not value.uses()]:
        graph.inputs.remove(value)  # the operator counts positions itself


def _count_tokens(graph: ir.Graph) -> tuple[ir.Value, ir.Value]:
    """Add the nodes that count tokens; return the last token's index of each row, (batch,), and the length of the longest, both int32."""
    mask = next((value for value in graph.inputs if value.name == MASK), None)
    if mask is None:
        raise _unsupported_error("its graph has no attention mask")
    one = add_constant(graph, "serving.one", np.array([1], np.int64))
    counted = ir.node("ReduceSum", [mask, one], {"keepdims": 0})
    last = ir.node("Sub", [counted.outputs[0], one])
    shape = ir.node("Shape", [mask])
    longest = ir.node("Gather", [shape.outputs[0], add_constant(graph, "serving.axis", np.array(1, np.int64))])
    casts = [ir.node("Cast", [node.outputs[0]], {"to": int(ir.DataType.INT32)}) for node in (last, longest)]
    steps = [counted, last, shape, longest, *casts]
    for index, step in enumerate(steps):
        step.name = step.outputs[0].name = f"serving.{step.op_type}.{index}"
    graph.insert_before(graph[0], steps)
    return casts[0].outputs[0], casts[1].outputs[0]


def _make_grouped(node: ir.Node, lengths: tuple[ir.Value, ir.Value], window: int) -> ir.Node:
    query, key, value, _, past_key, past_value = [*node.inputs, *[None] * 6][:6]
    heads, kv_heads = (node.attributes.get_int(f"{kind}_num_heads", 0) or 0 for kind in ("q", "kv"))
    if past_key is None or past_value is None or not (past_key.is_graph_input() and past_value.is_graph_input()):
        raise _unsupported_error("its attention does not read keys and values of the cache as they are")
    sizes = [past.shape[-1] if past.shape is not None else None for past in (past_key, past_value)]
    if sizes[0] != sizes[1] or not isinstance(sizes[0], int):
        raise _unsupported_error(f"its keys and values have the sizes {sizes[0]} and {sizes[1]}")
    if not heads or not kv_heads:
        raise _unsupported_error("its attention does not say how many heads it has")
    if any(output.uses() or output.is_graph_output() for output in node.outputs[3:]):
        raise _unsupported_error("its graph returns attention scores")
    attributes: dict[str, int | float] = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "scale": node.attributes.get_float("scale", 0.0) or sizes[0] ** -0.5,
    }
    if window:
        attributes["local_window_size"] = window
    if cap := node.attributes.get_float("softcap", 0.0):
        attributes["softcap"] = cap
    inputs: list[ir.Value | None] = [query, key, value, past_key, past_value, *lengths]
    rotary = _rotary_of(query, key) if sizes[0] % _ROTARY_MULTIPLE == 0 else None
    if rotary:
        inputs = [*(each.inputs[0] for each in rotary), *inputs[2:], *_tables(rotary[0])]
        attributes |= {"do_rotary": 1, "rotary_interleaved": rotary[0].attributes.get_int("interleaved", 0) or 0}
    new = ir.node(OPERATOR, inputs, attributes, domain=CONTRIB, num_outputs=3)
    new.name = node.name
    return new


def _masking_of(node: ir.Node) -> _Masking:
    return [*node.inputs, *[None] * 4][3], node.attributes.get_int("is_causal", 0) == 1


def _rotary_of(query: ir.Value | None, key: ir.Value | None) -> tuple[ir.Node, ir.Node] | None:
    """Return the rotary embeddings of queries and keys if both look up the same tables by the token's position."""
    nodes = [value.producer() for value in (query, key) if value is not None]
    if len(nodes) != 2 or any(node is None or node.op_type != "RotaryEmbedding" or node.domain for node in nodes):
        return None
    first, second = nodes
    assert first is not None
    assert second is not None
    kinds = {(*map(id, node.inputs[1:]), node.attributes.get_int("interleaved", 0)) for node in (first, second)}
    looked_up = all(
        value is not None
        and (lookup := value.producer()) is not None
        and (lookup.op_type, lookup.attributes.get_int("axis", 0)) == ("Gather", 0)
        and (at := lookup.inputs[1]) is not None
        and at.name == POSITIONS
        and at.is_graph_input()
        for value in first.inputs[1:3]
    )
    return (first, second) if len(kinds) == 1 and len(first.inputs) == 3 and looked_up else None


def _tables(rotary: ir.Node) -> list[ir.Value | None]:
    """Return the tables of cosines and sines, (positions, rotated size / 2)."""
    tables = []
    for value in rotary.inputs[1:3]:
        assert value is not None
        lookup = value.producer()
        assert lookup is not None
        tables.append(lookup.inputs[0])
    return tables


def _unsupported_error(why: str) -> ONNXExportError:
    return ONNXExportError(
        f"past and present keys and values of this model cannot share a buffer: {why}",
        reason="OPERATOR_UNSUPPORTED",
        remedy="set past_present_share_buffer to false",
        about={"engine": "mobius", "operator": OPERATOR},
    )


def window_of(graph: ir.Graph, mask: ir.Value, *, causal: bool, window: int) -> int | None:
    """Return the sliding window of a mask that hides padding and later tokens too: 0 for none, None if the mask does anything else.

    Args:
        graph: The decoder.
        mask: Its mask, bool (True is visible) or float (added to scores), (batch, 1, new, total).
        causal: Whether the operator that reads it hides later tokens itself.
        window: The window of the model's local layers; 0 for none.
    """
    inputs = [value for value in graph.inputs if value.name in (IDS, MASK)]
    try:
        part = ir.convenience.extract(graph, inputs, [mask])
        if any(value.const_value is None for value in part.initializers.values()):
            return None
        model = ir.serde.serialize_model(ir.Model(part, ir_version=10)).SerializeToString()
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        return next((size for size in sorted({0, window}) if _hides(session, size, causal=causal)), None)
    except (ValueError, *ORT_ERRORS):  # the mask depends on more than the tokens' places
        return None


def _hides(session: onnxruntime.InferenceSession, window: int, *, causal: bool) -> bool:
    return all(_matches(session, new, np.array(rows), window, causal=causal) for new, rows in _SAMPLES)


def _matches(session: onnxruntime.InferenceSession, new: int, mask: Array, window: int, *, causal: bool) -> bool:
    rows, total = mask.shape
    feed = {IDS: np.zeros((rows, new), np.int64), MASK: mask}
    taken = {value.name for value in session.get_inputs()}
    (bias,) = session.run(None, {name: value for name, value in feed.items() if name in taken})
    seen = bias if bias.dtype == bool else bias > _HIDDEN
    if bias.dtype != bool and np.any(bias[seen]):
        return False
    keys, queries = np.arange(total)[None, :], np.arange(total - new, total)[:, None]
    earlier = keys <= queries  # (new, total)
    shown = np.broadcast_to(seen & earlier if causal else seen, (rows, 1, new, total))[:, 0]
    if window:
        earlier &= keys > queries - window
    real = mask[:, -new:].astype(bool)  # queries that are padding do not matter
    return bool(np.array_equal(shown[real], (earlier & mask[:, None, :].astype(bool))[real]))
