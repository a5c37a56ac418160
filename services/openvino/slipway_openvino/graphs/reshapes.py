"""Give Reshape nodes constant targets instead of targets that are computed from shapes.

OpenVINO translates an operator of ONNX by a dozen nodes that read a shape, change it and join it again, in each layer. Most say only that
an axis stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

from slipway_openvino.library import ops, ov

_Axis = tuple[str, int, int]
"""An axis of a value: the unique name of its node, the output's number, and the axis's."""
_Size = int | _Axis | None
"""A number in a shape: known, the size of an axis, or computed in another way."""

_COPY, _REST = 0, -1
"""In a target of Reshape with ``special_zero``: the size of the same axis of the input, and what remains."""
_MOST_NUMBERS = 16
"""Most numbers of a shape that are followed; larger constants are tables."""
_WHOLE = (ov.Type.i32, ov.Type.i64)


def settle_reshapes(model: ov.Model) -> None:
    """Replace computed targets of Reshape by constants, in place, where these provably give the same shape of values that are not empty.

    A size is written as a number if it is known, as a copy if it is that of the input's axis at the same place. One other size may remain:
    it follows from the number of values.
    """
    sizes = _Sizes(model)
    _measure_origins(model, sizes)
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Reshape" or node.get_attributes()["special_zero"] or _is_measured(node):
            continue
        if node.input_value(1).get_node().get_type_name() == "Constant":
            continue
        target = sizes.constant_target(node)
        if target is not None:
            node.set_attribute("special_zero", True)
            node.input(1).replace_source_output(ops.constant(np.array(target, np.int64)).output(0))
    model.validate_nodes_and_infer_types()


class _Sizes:
    """Where the sizes of all values come from. Read once, in the order of the model."""

    def __init__(self, model: ov.Model) -> None:
        self._axes: dict[tuple[str, int], list[_Size]] = {}
        self._numbers: dict[tuple[str, int], list[_Size]] = {}
        for node in model.get_ordered_ops():
            numbers = self._read_numbers(node)
            if numbers is not None:
                self._numbers[node.get_name(), 0] = numbers
            for port in node.outputs():
                if port.get_partial_shape().rank.is_static:
                    self._axes[node.get_name(), port.get_index()] = self._read_axes(node, port)

    def axes(self, value: ov.Output) -> Sequence[_Size]:
        """Return the size of each axis of a value; none if their count is not known."""
        return self._axes.get(_key(value), [])

    def constant_target(self, node: ov.Node) -> list[int] | None:
        """Return a target for Reshape with ``special_zero``; None if there is none that is provably the same."""
        shape, before = node.get_output_partial_shape(0), self.axes(node.input_value(0))
        sizes = self._numbers.get(_key(node.input_value(1)))
        if shape.rank.is_dynamic or sizes is None or len(sizes) != len(shape):
            return None
        target = []
        for axis, (size, known) in enumerate(zip(sizes, shape, strict=True)):
            if known.is_static:
                target.append(known.get_length())
            else:
                is_kept = isinstance(size, tuple) and axis < len(before) and size == before[axis]
                target.append(_COPY if is_kept else _REST)
        # A known size of zero would mean a copy, and two remainders have no meaning.
        is_plain = all(known.is_dynamic or known.get_length() > 0 for known in shape)
        return target if is_plain and target.count(_REST) <= 1 else None

    def _read_numbers(self, node: ov.Node) -> list[_Size] | None:
        """Return the numbers of a scalar or of a value of one axis; None if they are too many, or no integers."""
        if node.get_output_size() != 1 or node.get_output_element_type(0) not in _WHOLE:
            return None
        shape = node.get_output_partial_shape(0)
        if shape.is_dynamic or len(shape) > 1 or math.prod(node.get_output_shape(0)) > _MOST_NUMBERS:
            return None
        inputs = [self._numbers.get(_key(value)) for value in node.input_values()]
        sizes: Sequence[_Size] | None
        match node.get_type_name(), inputs:
            case "Constant", _:
                sizes = _integers(node)
            case "ShapeOf", _:
                sizes = self.axes(node.input_value(0))
            case "Concat", _ if None not in inputs:
                sizes = [size for part in inputs for size in part or ()]
            case "Gather", [list(data), list(places), _]:
                sizes = [_pick(data, place) for place in places]
            case (("Convert" | "Squeeze" | "Unsqueeze"), [list(data), *_]):
                sizes = data
            case _:
                sizes = [None] * (shape[0].get_length() if len(shape) else 1)
        return list(sizes) if sizes else None

    def _read_axes(self, node: ov.Node, port: ov.Output) -> list[_Size]:
        sizes: list[_Size] = []
        for axis, known in enumerate(port.get_partial_shape()):
            before = None if known.is_static else self._passed_on(node, axis)
            own = (node.get_name(), port.get_index(), axis)
            sizes.append(known.get_length() if known.is_static else before or own)
        return sizes

    def _passed_on(self, node: ov.Node, axis: int) -> _Axis | None:
        """Return the axis from which a node's output has the size of an axis; None if this is not known."""
        if node.get_type_name() == "Reshape":
            target = self._numbers.get(_key(node.input_value(1)), [])
            is_whole = not node.get_attributes()["special_zero"] and axis < len(target)
            size = target[axis] if is_whole else None
        else:
            before, sizes = _axis_before(node, axis), self.axes(node.input_value(0)) if node.get_input_size() else []
            size = sizes[before] if before is not None and before < len(sizes) else None
        return size if isinstance(size, tuple) else None


def _measure_origins(model: ov.Model, sizes: _Sizes) -> None:
    """Read the size of an axis where it comes from, in place, and not from a result that repeats it.

    The plugins fuse attention with repeated heads only if nothing else reads these.
    """
    nodes = {node.get_name(): node for node in model.get_ops()}
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Gather" or node.input_value(0).get_node().get_type_name() != "ShapeOf":
            continue
        measured = node.input_value(0).get_node().input_value(0)
        places, axes = _integers(node.input_value(1).get_node()) or [], sizes.axes(measured)
        size = _pick(axes, places[0]) if len(places) == 1 else None
        if not isinstance(size, tuple) or size[0] == measured.get_node().get_name():
            continue
        name, number, axis = size
        kind = node.get_output_element_type(0).get_type_name()
        place = np.full(node.get_input_shape(1), axis, np.int64)
        node.input(0).replace_source_output(ops.shape_of(nodes[name].output(number), output_type=kind).output(0))
        node.input(1).replace_source_output(ops.constant(place).output(0))
    model.validate_nodes_and_infer_types()


def _is_measured(node: ov.Node) -> bool:
    readers = chain.from_iterable(port.get_target_inputs() for port in node.outputs())
    return any(reader.get_node().get_type_name() == "ShapeOf" for reader in readers)


def _axis_before(node: ov.Node, axis: int) -> int | None:
    """Return the axis of a node's first input that has the size of an axis of its output; None if this is not known."""
    kind = node.get_type_name()
    if kind == "Convert":
        return axis
    numbers = _integers(node.input_value(1).get_node()) if kind in ("Unsqueeze", "Transpose", "Broadcast") else None
    if numbers is None:
        return None
    rank = len(node.get_output_partial_shape(0))
    match kind:
        case "Transpose":
            return numbers[axis] if numbers else None
        case "Unsqueeze":
            return axis - sum(number % rank < axis for number in numbers)
    before, repeats = axis - rank + len(node.get_input_partial_shape(0)), [1] * (rank - len(numbers)) + numbers
    is_kept = node.get_attributes()["mode"] == "bidirectional" and repeats[axis] == 1 and before >= 0
    return before if is_kept else None


def _pick(sizes: Sequence[_Size], place: _Size) -> _Size:
    return sizes[place] if isinstance(place, int) and 0 <= place < len(sizes) else None


def _integers(node: ov.Node) -> list[int] | None:
    """Return the integers of a small constant; None for any other node."""
    if node.get_type_name() != "Constant" or node.get_element_type() not in _WHOLE:
        return None
    if math.prod(node.get_output_shape(0)) > _MOST_NUMBERS:
        return None
    return [int(value) for value in node.get_data().reshape(-1)]


def _key(value: ov.Output) -> tuple[str, int]:
    return value.get_node().get_name(), value.get_index()
