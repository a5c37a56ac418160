"""Rewrite attention to the form that OpenVINO's plugins recognise and fuse with the cache; the results stay the same."""

from __future__ import annotations

import numpy as np

from slipway_openvino.library import ops, ov


def simplify_attention(model: ov.Model) -> None:
    """Repeat heads by Broadcast instead of Tile, and make the layers share one mask, in place.

    OpenVINO translates ONNX's Attention layer by layer: it tiles shared keys and values, which its plugins do not recognise, and makes
    the same causal mask again in each layer. With both, decoding the sample took ten times as long.
    """
    _broadcast_heads(model)
    _share_masks(model)
    model.validate_nodes_and_infer_types()


def _broadcast_heads(model: ov.Model) -> None:
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Tile" or node.input_value(1).get_node().get_type_name() != "Constant":
            continue
        repeats = node.input_value(1).get_node().get_data().reshape(-1)
        shape = node.get_input_partial_shape(0)
        # Broadcast repeats only axes of length 1.
        if len(shape) != len(repeats) or any(
            count > 1 and not (axis.is_static and axis.get_length() == 1)
            for axis, count in zip(shape, repeats.tolist(), strict=True)
        ):
            continue
        wanted = ops.constant(repeats.astype(np.int64))
        repeated = ops.broadcast(node.input_value(0), wanted, broadcast_spec="BIDIRECTIONAL")
        for reader in node.output(0).get_target_inputs():
            reader.replace_source_output(repeated.output(0))


def _share_masks(model: ov.Model) -> None:
    """Use the first causal mask in every layer whose mask has the same source: all layers have the same lengths."""
    first: dict[tuple[str, int], ov.Output] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() != "ScaledDotProductAttention" or node.get_input_size() < 4:
            continue
        mask = node.input_value(3)
        given = _given_mask(mask.get_node())
        if given is not None:
            node.input(3).replace_source_output(first.setdefault(given, mask))


def _given_mask(mask: ov.Node) -> tuple[str, int] | None:
    """Return the source of a mask that is combined with a causal one, ``Add(Select(given, …), Select(LessEqual(…), …))``; else None."""
    if mask.get_type_name() != "Add":
        return None
    parts = [value.get_node() for value in mask.input_values()]
    if any(part.get_type_name() != "Select" for part in parts):
        return None
    given, causal = (part.input_value(0) for part in parts)
    if causal.get_node().get_type_name() != "LessEqual":
        return None
    return given.get_node().get_friendly_name(), given.get_index()
