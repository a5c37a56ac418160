"""Store integer weights as OpenVINO's plugins like them: signed, with scales in half precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipway_openvino.library import ops, ov

_SIGNED: Mapping[str, tuple[Any, int, int]] = {"u4": (ov.Type.i4, 8, 0x88), "u8": (ov.Type.i8, 128, 0x80)}
"""Type of integers without a zero point, by that of integers with one: the zero point that it replaces, and the bits that differ."""
_HALF_ERROR = 2.0**-10
"""Largest relative error of a scale in half precision, unless it is too small for it."""


def sign_integers(model: ov.Model, work: Path) -> np.ndarray | None:
    """Rewrite ``(integer - zero point) x scale`` of constants, in place; return the memory of the new ones, which the model uses.

    An integer less the middle of its range is the same bits with the highest one turned. The plugins then need no subtraction, which
    some of them refuse. Integers with other zero points stay as they are, with scales in half precision. What has scales that half
    precision cannot hold stays. The new integers lie in a mapped file below ``work``, so that they take no other memory. They have the names
    of the old ones, by which their weights are found in the IR.
    """
    found = []
    for node in model.get_ordered_ops():
        parts = _parts(node)
        if parts is not None and parts[1] is not None:
            found.append(parts)
        elif parts is not None:
            _halve(node, parts[2])
    total = sum(parts[1].get_byte_size() for parts in found)
    if not found:
        return None
    place = np.memmap(work / "integers.bin", np.uint8, mode="w+", shape=(total,))
    begin, named = 0, set[str]()
    for product, stored, scale in found:
        kind, _, turned = _SIGNED[stored.get_element_type().get_type_name()]
        own = place[begin : begin + stored.get_byte_size()]
        np.bitwise_xor(stored.data.view(np.uint8).reshape(-1), np.uint8(turned), out=own)
        begin += len(own)
        integers = ops.constant(ov.Tensor(own, stored.get_output_shape(0), kind), shared_memory=True)
        if (
            name := stored.get_friendly_name()
        ) not in named:  # of two of one name, the IR would number one as this process counts
            integers.set_friendly_name(name)
            named.add(name)
        _replace(product, ops.multiply(ops.convert(integers, "f16"), ops.constant(scale)))
    model.validate_nodes_and_infer_types()
    return place


def _halve(product: ov.Node, scale: np.ndarray) -> None:
    """Let readers of a product read another in half precision, of the same integers and zero points."""
    stored, zero = (_unconverted(value) for value in product.input_value(0).get_node().input_values())
    difference = ops.subtract(ops.convert(stored, "f16"), ops.convert(zero, "f16"))
    _replace(product, ops.multiply(difference, ops.constant(scale)))


def _unconverted(value: Any) -> Any:
    node = value.get_node()
    return node.input_value(0) if node.get_type_name() == "Convert" else value


def _replace(product: ov.Node, halves: ov.Node) -> None:
    """Let readers of a product read another in half precision, whose groups are joined before it becomes float32.

    In that order the plugins keep the integers. In the other one, they compute all weights in float32 when they load the model.
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
    """Return a product of integers and scales, its integers, and its scales in half precision; None if it is anything else.

    The integers are None if they have zero points other than the middle of their range.
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
    """Return the values of a constant; OpenVINO gives the bits of a bfloat16 as those of a float16."""
    if constant.get_element_type().get_type_name() != "bf16":
        return constant.get_data()
    return (constant.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _constant(node: ov.Node) -> Any:
    """Return the constant behind a conversion or another shape; None if there is none."""
    while node.get_type_name() in ("Convert", "Reshape"):
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "Constant" else None
