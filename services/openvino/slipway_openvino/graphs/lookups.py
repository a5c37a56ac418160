"""Rewrite a quantized graph so that OpenVINO can read it and keeps integers: store the scales of looked-up rows, and join rows' groups."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from slipway.files.paths import real_file
from slipway.texts import printable


def readable_graph(graph: Path, work: Path) -> Path:
    """Return a graph that OpenVINO can read: itself, or a rewritten one in the folder ``work``, with links to the weights.

    ``GatherBlockQuantized`` shares its data with a product, which takes scales of another rank, so the graph reshapes them. OpenVINO needs
    constant scales, so they become the same bytes under another shape. Its plugins compute a table in float32 when they load it, unless
    each row is a single axis, so rows are joined where possible.
    """
    model = ir.load(graph)
    lookups = [node for node in model.graph if node.op_type == "GatherBlockQuantized"]
    changed = [node for node in lookups if _make_readable(model.graph, node)]
    if not changed:
        return graph
    for name in sorted({str(value.location) for value in _external_tensors(model.graph)}):
        if name != Path(name).name or name == graph.name:
            raise ValueError(f"its weights are in {printable(name)!r}, which is no file beside it")
        weights = real_file(graph.parent, name)
        try:
            os.link(weights, work / name)  # OpenVINO follows no symbolic link out of the graph's folder
        except OSError:  # on another file system
            shutil.copyfile(weights, work / name)
    ir.save(model, work / graph.name)
    return work / graph.name


def _external_tensors(graph: ir.Graph) -> list[ir.ExternalTensor]:
    values = (value.const_value for value in graph.initializers.values())
    return [value for value in values if isinstance(value, ir.ExternalTensor)]


def _make_readable(graph: ir.Graph, lookup: ir.Node) -> bool:
    """Replace a lookup's reshaped scales by constants of that shape, and read whole rows if possible; return whether it changed."""
    scales = lookup.inputs[2]
    reshape = scales.producer() if scales is not None else None
    if scales is None or reshape is None or reshape.op_type != "Reshape" or reshape.inputs[0] is None:
        return False
    stored, target = _constant(reshape.inputs[0]), reshape.inputs[1].const_value if reshape.inputs[1] else None
    if stored is None or target is None:
        return False
    shape = target.numpy().tolist()
    if _can_read_rows(lookup, shape):
        _read_rows(graph, lookup)
        shape = shape[:2]
    lookup.replace_input_with(2, _add_reshaped(graph, stored, shape))
    if not scales.uses():
        graph.remove(reshape, safe=True)
    return True


def _constant(scales: ir.Value) -> ir.TensorProtocol | None:
    """Return the constant scales in float32, as the graph uses them; None if they are computed."""
    producer = scales.producer()
    if producer is None or producer.op_type != "Cast" or producer.inputs[0] is None:
        return scales.const_value
    stored = producer.inputs[0].const_value
    return None if stored is None else ir.tensor(_values(stored).astype(np.float32), name=scales.name)


def _values(stored: ir.TensorProtocol) -> np.ndarray:
    """Return the values of a constant. Maps its file here: onnx_ir refuses files with several hard links, as artifacts have."""
    if not isinstance(stored, ir.ExternalTensor):
        return stored.numpy()
    weights, shape = real_file(Path(stored.base_dir), str(stored.location)), tuple(stored.shape.numpy())
    raw = np.memmap(weights, np.uint8, mode="r", offset=stored.offset or 0, shape=(stored.nbytes,))
    return np.frombuffer(raw, stored.dtype.numpy()).reshape(shape)


def _can_read_rows(lookup: ir.Node, scales: Sequence[int]) -> bool:
    """Return whether a lookup's data is (rows, groups, bytes), and all its readers join the groups."""
    data, zeros = (value.const_value if value else None for value in (lookup.inputs[0], _zeros(lookup)))
    bits = lookup.attributes.get_int("bits", 4)
    axes = [lookup.attributes.get_int(f"{name}_axis", default) for name, default in (("gather", 0), ("quantize", 1))]
    if data is None or len(data.shape) != 3 or axes != [0, 2] or bits not in (4, 8):
        return False
    rows, groups, size = data.shape.numpy()
    if list(scales) != [rows, groups, 1] or lookup.outputs[0].is_graph_output():
        return False
    if _zeros(lookup) is not None and (zeros is None or zeros.shape != (rows, groups, 1) or (bits == 4 and groups % 2)):
        return False  # OpenVINO 2026.4 fails to compile whole rows with an odd number of 4-bit zero points
    whole = groups * size * 8 // bits
    return all(_joins_groups(use.node, whole) for use in lookup.outputs[0].uses())


def _joins_groups(reader: ir.Node, columns: int) -> bool:
    target = reader.inputs[1].const_value if reader.op_type == "Reshape" and reader.inputs[1] is not None else None
    if target is None:
        return False
    *kept, last = target.numpy().tolist()
    return last == columns and not any(kept)


def _zeros(lookup: ir.Node) -> ir.Value | None:
    return lookup.inputs[3] if len(lookup.inputs) > 3 else None


def _read_rows(graph: ir.Graph, lookup: ir.Node) -> None:
    """Reshape a lookup's data to (rows, bytes) and its zero points to (rows, groups), with two 4-bit ones in a byte."""
    data, zeros = lookup.inputs[0], _zeros(lookup)
    assert data is not None
    assert data.const_value is not None
    rows, groups, size = data.const_value.shape.numpy()
    lookup.replace_input_with(0, _add_reshaped(graph, data.const_value, (rows, groups * size)))
    lookup.attributes["quantize_axis"] = ir.AttrInt64("quantize_axis", 1)
    if zeros is None:
        return
    assert zeros.const_value is not None
    points = zeros.const_value.numpy().reshape(rows, groups)
    if lookup.attributes.get_int("bits", 4) == 4:
        points = points[:, 0::2] | (points[:, 1::2] << 4)
    packed = ir.tensor(np.ascontiguousarray(points), name=f"{zeros.name}.rows")
    lookup.replace_input_with(3, _register(graph, packed))


def _add_reshaped(graph: ir.Graph, stored: ir.TensorProtocol, shape: Sequence[int]) -> ir.Value:
    """Add an initializer with the bytes of a stored one under another shape; return it."""
    name = f"{stored.name}.rows.{'x'.join(map(str, shape))}"
    if isinstance(stored, ir.ExternalTensor):
        place = (stored.location, stored.offset, stored.length, stored.dtype)
        return _register(graph, ir.ExternalTensor(*place, shape=ir.Shape(shape), name=name, base_dir=stored.base_dir))
    return _register(graph, ir.tensor(stored.numpy().reshape(shape), name=name))


def _register(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Register an initializer unless another lookup has done so; return it."""
    assert tensor.name is not None
    if tensor.name not in graph.initializers:
        kind = ir.TensorType(tensor.dtype)
        graph.register_initializer(
            ir.Value(name=tensor.name, const_value=tensor, shape=ir.Shape(tensor.shape.numpy()), type=kind)
        )
    return graph.initializers[tensor.name]
