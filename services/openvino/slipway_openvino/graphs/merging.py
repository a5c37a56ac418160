"""Compute once what a graph computes in each layer: OpenVINO's translation repeats masks, shapes and small constants."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import chain

from slipway_openvino.graphs.passes import is_numbered
from slipway_openvino.library import ov

_PURE = frozenset(
    {
        "Abs",
        "Add",
        "Broadcast",
        "Concat",
        "Convert",
        "ConvertLike",
        "Cos",
        "Divide",
        "Equal",
        "Exp",
        "Floor",
        "FloorMod",
        "Gather",
        "GatherElements",
        "GatherND",
        "Greater",
        "GreaterEqual",
        "Less",
        "LessEqual",
        "Log",
        "LogicalAnd",
        "LogicalNot",
        "LogicalOr",
        "Maximum",
        "Minimum",
        "Mod",
        "Multiply",
        "Negative",
        "NotEqual",
        "Power",
        "Range",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceSum",
        "Reshape",
        "Select",
        "ShapeOf",
        "Sigmoid",
        "Sin",
        "Slice",
        "Sqrt",
        "Squeeze",
        "StridedSlice",
        "Subtract",
        "Tile",
        "Transpose",
        "Unsqueeze",
        "VariadicSplit",
    }
)
"""Operators whose results follow from their inputs and attributes alone. Random ones, those with a state and those with inner graphs do not."""
_INTERFACE = frozenset({"Assign", "Result"})
"""Readers whose source stays their own: names of outputs are those of their sources, and plugins fuse each state with what it keeps."""
_SHARED_TYPES = (ov.Type.boolean, ov.Type.i32, ov.Type.i64)
"""Types of axes, indices and sizes; others may be zero points."""
_SHARING = frozenset({"Broadcast", "Power", "Select"})
"""Readers of floats that may be shared. The plugin folds a factor or a summand into the product before it only if nothing else reads it."""
_LARGEST_CONSTANT_BYTES = 256


def merge_equal_nodes(model: ov.Model) -> None:
    """Let the readers of nodes that compute the same read the first of them, in place.

    Weights are not touched, nor what is computed from them alone: readers of the IR find them by name, and plugins recognise integers only
    if each product has its own.
    """
    first: dict[Hashable, ov.Node] = {}
    fixed: dict[str, bool] = {}  # names of nodes that follow from constants: whether a weight is among these
    for node in model.get_ordered_ops():
        has_weight = _has_weight(node, fixed)
        if has_weight is not None:
            fixed[node.get_name()] = has_weight
        if has_weight or not _may_merge(node):
            continue
        same = first.setdefault(_key(node), node)
        if same.get_name() != node.get_name():
            _replace(node, same)
    model.validate_nodes_and_infer_types()


def _has_weight(node: ov.Node, fixed: Mapping[str, bool]) -> bool | None:
    """Return whether a node follows from constants with a weight among them; None if it does not follow from constants alone."""
    if node.get_type_name() == "Constant":
        return not _is_shareable(node)
    sources = [fixed.get(value.get_node().get_name()) for value in node.input_values()]
    return any(sources) if sources and None not in sources else None


def drop_idle_conversions(model: ov.Model) -> None:
    """Remove ConvertLike nodes between values of one type, in place, but for those whose results have names of their own."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "ConvertLike" or _is_interface(node) or _own_names(node.output(0)):
            continue
        kind, like = node.get_input_element_type(0), node.get_input_element_type(1)
        if kind.is_static() and kind == like:
            for reader in node.output(0).get_target_inputs():
                reader.replace_source_output(node.input_value(0))
    model.validate_nodes_and_infer_types()


def _is_shareable(constant: ov.Node) -> bool:
    """Return whether a constant is a small one that OpenVINO made for itself, such as an axis; weights are known by their names."""
    kind = constant.get_element_type()
    if kind not in _SHARED_TYPES and not (kind.is_real() and _reader_kinds(constant) <= _SHARING):
        return False
    is_small = constant.get_byte_size() <= _LARGEST_CONSTANT_BYTES and len(constant.get_output_shape(0)) <= 1
    return is_small and is_numbered(constant.get_friendly_name())


def _may_merge(node: ov.Node) -> bool:
    return node.get_type_name() in _PURE | {"Constant"} and not _is_interface(node)


def _is_interface(node: ov.Node) -> bool:
    return bool(_reader_kinds(node) & _INTERFACE)


def _reader_kinds(node: ov.Node) -> set[str]:
    readers = chain.from_iterable(port.get_target_inputs() for port in node.outputs())
    return {reader.get_node().get_type_name() for reader in readers}


def _key(node: ov.Node) -> Hashable:
    """Return what a node's results follow from."""
    if node.get_type_name() == "Constant":
        kind, shape = node.get_element_type().get_type_name(), tuple(node.get_output_shape(0))
        return "Constant", kind, shape, node.data.tobytes()
    attributes = tuple(sorted((name, repr(value)) for name, value in node.get_attributes().items()))
    inputs = tuple((value.get_node().get_name(), value.get_index()) for value in node.input_values())
    info = node.get_type_info()
    return info.name, info.version_id, attributes, inputs


def _replace(node: ov.Node, same: ov.Node) -> None:
    for port, other in zip(node.outputs(), same.outputs(), strict=True):
        other.add_names(_own_names(port))
        for reader in port.get_target_inputs():
            reader.replace_source_output(other)


def _own_names(port: ov.Output) -> set[str]:
    return {name for name in port.get_names() if not is_numbered(name)}
