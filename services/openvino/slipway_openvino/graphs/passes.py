"""Rewrite a model before it is saved: integers and attention as plugins run them best, and names that stay the same.

Integer weights become signed, with scales in half precision. Attention gets the form that OpenVINO's plugins recognise and fuse with the
cache; the results stay the same. Nodes and ports get names that are the same in every process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipway_openvino.library import ops, ov

_SIGNED: Mapping[str, tuple[Any, int, int]] = {"u4": (ov.Type.i4, 8, 0x88), "u8": (ov.Type.i8, 128, 0x80)}
"""By type of integers with a zero point: the type without one, the zero point that this replaces, and the bits to flip."""
_HALF_ERROR = 2.0**-10
"""Largest relative error of a scale that half precision can hold."""

_STACK = 3
"""Axes of a stack of matrices."""
_NUMBERED = re.compile(r"([A-Z][A-Za-z0-9]*)_\d+(?:\.\d+)?")
"""Name that OpenVINO makes from an operator's type and a counter of the process. A folded constant keeps its operator's name."""


def sign_integers(model: ov.Model, work: Path) -> np.ndarray | None:
    """Rewrite ``(integer - zero point) x scale`` of constants, in place; return the memory of the new integers, which the model uses.

    Subtracting the middle of an integer's range only flips its highest bit. The plugins then need no subtraction, which some of them
    refuse. Integers with other zero points are kept, with scales in half precision. Products whose scales half precision cannot hold are
    not changed. The new integers lie in a mapped file below ``work``, to save memory. They keep their old names, by which their weights
    are found in the IR.
    """
    products = []
    for node in model.get_ordered_ops():
        parts = _parts(node)
        if parts is not None and parts[1] is not None:
            products.append(parts)
        elif parts is not None:
            _halve(node, parts[2])
    total = sum(parts[1].get_byte_size() for parts in products)
    if not products:
        return None
    place = np.memmap(work / "integers.bin", np.uint8, mode="w+", shape=(total,))
    begin, named = 0, set[str]()
    for product, stored, scale in products:
        kind, _, turned = _SIGNED[stored.get_element_type().get_type_name()]
        own = place[begin : begin + stored.get_byte_size()]
        np.bitwise_xor(stored.data.view(np.uint8).reshape(-1), np.uint8(turned), out=own)
        begin += len(own)
        integers = ops.constant(ov.Tensor(own, stored.get_output_shape(0), kind), shared_memory=True)
        if (
            name := stored.get_friendly_name()
        ) not in named:  # the IR would number a second constant of this name by a counter of the process
            integers.set_friendly_name(name)
            named.add(name)
        _replace(product, ops.multiply(ops.convert(integers, "f16"), ops.constant(scale)))
    model.validate_nodes_and_infer_types()
    return place


def _halve(product: ov.Node, scale: np.ndarray) -> None:
    """Replace a product by one in half precision, with the same integers and zero points."""
    stored, zero = (_skip_convert(value) for value in product.input_value(0).get_node().input_values())
    difference = ops.subtract(ops.convert(stored, "f16"), ops.convert(zero, "f16"))
    _replace(product, ops.multiply(difference, ops.constant(scale)))


def _skip_convert(value: Any) -> Any:
    node = value.get_node()
    return node.input_value(0) if node.get_type_name() == "Convert" else value


def _replace(product: ov.Node, halves: ov.Node) -> None:
    """Replace a product by one in half precision; join its groups before the conversion to float32.

    In this order the plugins keep the integers. In the other order, they compute all weights in float32 when they load the model.
    """
    for reader in product.output(0).get_target_inputs():
        joined = reader.get_node()
        if joined.get_type_name() == "Reshape" and joined.get_output_partial_shape(0).is_static:
            shape = ops.constant(np.array(joined.get_output_shape(0), np.int64))
            whole = ops.convert(ops.reshape(halves, shape, special_zero=False), "f32")
            for further in joined.output(0).get_target_inputs():
                further.replace_source_output(whole.output(0))
        else:
            reader.replace_source_output(ops.convert(halves, "f32").output(0))


def _parts(product: ov.Node) -> tuple[ov.Node, Any, np.ndarray] | None:
    """Return a product of integers and scales, its integers, and its scales in half precision; None for any other node.

    The integers are None if a zero point is not the middle of their range.
    """
    if product.get_type_name() != "Multiply" or product.input_value(0).get_node().get_type_name() != "Subtract":
        return None
    difference, scale = (value.get_node() for value in product.input_values())
    stored, zero = (_constant(value.get_node()) for value in difference.input_values())
    scales = _constant(scale)
    if stored is None or zero is None or scales is None:
        return None
    known = _SIGNED.get(stored.get_element_type().get_type_name())
    if known is None:
        return None
    has_zeros = bool((zero.get_data() != known[1]).any())
    values = _floats(scales).reshape(scale.get_output_shape(0))
    halves = values.astype(np.float16)
    if not (np.abs(halves.astype(np.float32) - values) <= _HALF_ERROR * np.abs(values)).all():
        return None
    return product, None if has_zeros else stored, halves


def _floats(constant: Any) -> np.ndarray:
    """Return the values of a constant. For bfloat16, OpenVINO returns the bits as if they were float16."""
    if constant.get_element_type().get_type_name() != "bf16":
        return constant.get_data()
    return (constant.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _constant(node: ov.Node) -> Any:
    """Return the constant behind conversions and reshapes; None if there is none."""
    while node.get_type_name() in ("Convert", "Reshape"):
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "Constant" else None


def spread_over_experts(model: ov.Model) -> None:
    """Repeat tokens for each expert before products of all tokens with all experts, in place.

    A traced mixture multiplies (1, tokens, K) by (experts, K, N). The plugin for CPUs (2026.4) makes room for the results of one expert there,
    and ends with "Can not clone with new dims" or with no results at all.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        tokens, matrices = node.get_input_partial_shape(0), node.get_input_partial_shape(1)
        if tokens.rank != ov.Dimension(_STACK) or matrices.rank != ov.Dimension(_STACK):
            continue
        count = matrices[0].get_length() if matrices[0].is_static else 1
        if count > 1 and tokens[0] == ov.Dimension(1):
            wanted = ops.constant(np.array([count, 1, 1], np.int64))
            repeated = ops.broadcast(node.input_value(0), wanted, broadcast_spec="BIDIRECTIONAL")
            node.input(0).replace_source_output(repeated.output(0))
    model.validate_nodes_and_infer_types()


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


def number_nodes(model: ov.Model) -> None:
    """Renumber, by position in the model, everything that OpenVINO named by a counter of the process. Works in place."""
    for place, node in enumerate(model.get_ordered_ops()):
        node.set_friendly_name(_number_name(node.get_friendly_name(), place))
        for port in node.outputs():
            port.set_names({_number_name(name, place) for name in port.get_names()})


def is_numbered(name: str) -> bool:
    """Return whether OpenVINO made a name by a counter of the process."""
    return _NUMBERED.fullmatch(name) is not None


def _number_name(name: str, place: int) -> str:
    match = _NUMBERED.fullmatch(name)
    return f"{match[1]}_{place}" if match else name
