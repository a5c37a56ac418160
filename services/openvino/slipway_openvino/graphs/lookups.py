"""Give a quantized graph the form that OpenVINO reads: scales of looked-up rows as they are stored, not reshaped at run time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import onnx_ir as ir

from slipway.files.links import real_file
from slipway.texts import printable


def readable_graph(graph: Path, work: Path) -> Path:
    """Return a graph in a form that OpenVINO reads; one that is rewritten lies in the folder ``work``, with links to the weights.

    ``GatherBlockQuantized`` shares its data with a product, which takes scales of another rank, so the graph reshapes them. OpenVINO wants
    them constant: here they are the same bytes under another shape.
    """
    model = ir.load(graph)
    lookups = [node for node in model.graph if node.op_type == "GatherBlockQuantized"]
    changed = [node for node in lookups if _reshape_stored(model.graph, node)]
    if not changed:
        return graph
    for name in sorted({str(value.location) for value in _external(model.graph)}):
        if name != Path(name).name or name == graph.name:
            raise ValueError(f"its weights are in {printable(name)!r}, which is no file beside it")
        weights = real_file(graph.parent, name)
        try:
            os.link(weights, work / name)  # OpenVINO follows no symbolic link out of the graph's folder
        except OSError:  # on another file system
            shutil.copyfile(weights, work / name)
    ir.save(model, work / graph.name)
    return work / graph.name


def _external(graph: ir.Graph) -> list[ir.ExternalTensor]:
    values = (value.const_value for value in graph.initializers.values())
    return [value for value in values if isinstance(value, ir.ExternalTensor)]


def _reshape_stored(graph: ir.Graph, lookup: ir.Node) -> bool:
    """Let a lookup read stored scales under the shape that a Reshape would give them; return whether it changed."""
    scales = lookup.inputs[2]
    reshape = scales.producer() if scales is not None else None
    if scales is None or reshape is None or reshape.op_type != "Reshape" or reshape.inputs[0] is None:
        return False
    stored, target = reshape.inputs[0].const_value, reshape.inputs[1].const_value if reshape.inputs[1] else None
    if stored is None or target is None:
        return False
    shape = ir.Shape(target.numpy().tolist())
    name = f"{stored.name}.rows.{'x'.join(map(str, shape))}"
    if name not in graph.initializers:
        if isinstance(stored, ir.ExternalTensor):
            again: ir.TensorProtocol = ir.ExternalTensor(
                stored.location,
                stored.offset,
                stored.length,
                stored.dtype,
                shape=shape,
                name=name,
                base_dir=stored.base_dir,
            )
        else:
            again = ir.tensor(stored.numpy().reshape(shape.numpy()), name=name)
        value = ir.Value(name=name, const_value=again, shape=shape, type=ir.TensorType(stored.dtype))
        graph.register_initializer(value)
    lookup.replace_input_with(2, graph.initializers[name])
    if not scales.uses():
        graph.remove(reshape, safe=True)
    return True
