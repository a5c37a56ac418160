"""Normalize an engine's graph before its weights are written: share equal weights, fold transposes, check names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from slipway.distribution import own_version
from slipway.errors import ONNXExportError
from slipway.texts import counted
from slipway_onnx_export.interface import Component
from slipway_onnx_export.loading.conversion import Stack, Weight, place_of
from slipway_onnx_export.loading.weightless import find_misfits
from slipway_onnx_export.source import ModelSource

# Suffix of a weight that is stored transposed, (in, out) instead of PyTorch's (out, in), after its PyTorch name.
TRANSPOSED_SUFFIX = ".T"

_NORMS = ("LayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
"""Operators whose results after the first are optional."""


def normalize_graph(
    model: ir.Model,
    weights: Mapping[str, Weight],
    *,
    source: ModelSource,
    engine: str,
    natural: Collection[tuple[object, ...]] = (),
) -> dict[str, Weight]:
    """Normalize an engine's graph in place, so that all engines write the same form.

    Equal weights become one initializer. ``MatMul(x, Transpose(W))`` becomes a MatMul with W stored transposed; if W has
    another use (a tied embedding), the Transpose stays.

    Args:
        model: The graph.
        weights: The tensors of its weights by name.
        source: The model's folder.
        engine: The engine's name.
        natural: Places of weights that another graph of the folder has as they are. They stay so here, and are stored once.

    Returns:
        The tensor of every initializer without a value, in the order in which they are written.

    Raises:
        ONNXExportError: ``BASE_MODEL_INVALID`` if the model lacks a weight of its configuration or has it in another shape,
            ``EXPORT_ENGINE_FAILED`` if the graph needs a weight that the configuration does not imply.
    """
    graph = model.graph
    wanted = {name: value for name, value in graph.initializers.items() if value.const_value is None}
    wrong = sorted(
        name for name, value in wanted.items() if name not in weights or _shape(value) != [*weights[name].shape]
    )
    if wrong:
        raise _misfit_error(wrong, source, engine)
    bound = {name: weights[name] for name in wanted}
    _share_equal(graph, bound)
    if engine != "mobius":
        _use_stored_names(graph, bound, source.weights)
    _split_gemms(graph, bound)
    _fold_transposes(graph, bound, natural)
    _leave_out_unused_results(graph)
    _strip_traces(model)
    return bound


def _misfit_error(names: list[str], source: ModelSource, engine: str) -> ONNXExportError:
    """Return the error for weights that the folder lacks or has in another shape: the folder's fault, or the engine's."""
    lost = find_misfits(source, engine=engine)
    if lost:
        return ONNXExportError(
            f"{source.folder.name} lacks {counted(len(lost), 'weight')} of {source.architecture} or has them in another shape, "
            f"first {lost[0]!r}",
            reason="BASE_MODEL_INVALID",
            remedy="give a complete transformers model folder whose config.json fits its weights",
            about={"tensor": lost[0], "count": len(lost)},
        )
    return ONNXExportError(
        f"the graph needs {counted(len(names), 'weight')} that the model has under other names or in other shapes, first {names[0]!r}",
        reason="EXPORT_ENGINE_FAILED",
        remedy="use another engine",
        about={"engine": engine, "tensor": names[0], "count": len(names)},
    )


def _shape(value: ir.Value) -> list[int]:
    return [dim if isinstance(dim, int) else -1 for dim in value.shape or ()]


def _share_equal(graph: ir.Graph, bound: dict[str, Weight]) -> None:
    """Replace initializers that are views of the same bytes by the first of them."""
    first: dict[tuple[object, ...], str] = {}
    for name in list(bound):
        keeper = first.setdefault(place_of(bound[name]), name)
        if keeper != name:
            graph.initializers[name].replace_all_uses_with(graph.initializers[keeper])
            del graph.initializers[name]
            del bound[name]


def _use_stored_names(graph: ir.Graph, bound: dict[str, Weight], stored: Mapping[str, Weight]) -> None:
    """Give weights the names that the folder has for them: tracers choose any of a tied weight's names."""
    names = {place_of(weight): name for name, weight in stored.items()}
    for name in [name for name in bound if name not in stored]:
        own = names.get(place_of(bound[name]))
        if own is not None and own not in graph.initializers:
            graph.initializers[name].name = own
            bound[own] = bound.pop(name)


def _split_gemms(graph: ir.Graph, bound: Mapping[str, Weight]) -> None:
    """Replace ``Gemm(x, W, b)`` by MatMul and Add, so that all linear layers have the same form."""
    for node in list(graph):
        if node.op_type != "Gemm" or len(node.inputs) < 2 or node.inputs[1] is None:
            continue
        attributes = node.attributes
        scaled = attributes.get_float("alpha", 1.0) != 1.0 or attributes.get_float("beta", 1.0) != 1.0
        if node.inputs[1].name not in bound or attributes.get_int("transA") or scaled:
            continue
        steps: list[ir.Node] = []
        weight = node.inputs[1]
        if attributes.get_int("transB"):
            steps.append(ir.node("Transpose", [weight], {"perm": [1, 0]}))
            weight = steps[-1].outputs[0]
        steps.append(ir.node("MatMul", [node.inputs[0], weight]))
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            steps.append(ir.node("Add", [steps[-1].outputs[0], node.inputs[2]]))
        replace_node(graph, node, steps)


def replace_node(graph: ir.Graph, node: ir.Node, steps: list[ir.Node]) -> None:
    """Replace a node that has one output by several; the last takes over its output's name, shape and type."""
    old, new = node.outputs[0], steps[-1].outputs[0]
    for step in steps:
        for output in step.outputs:
            output.name = output.name or f"{old.name}.{step.op_type}"
    name = old.name
    new.shape, new.type = old.shape, old.type
    graph.insert_before(node, steps)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    new.name = name


def _fold_transposes(graph: ir.Graph, bound: dict[str, Weight], natural: Collection[tuple[object, ...]]) -> None:
    """Store a weight transposed if its only users are equal Transpose nodes."""
    for name in [name for name in bound if place_of(bound[name]) not in natural]:
        value = graph.initializers[name]
        readers = [use.node for use in value.uses()]
        perms = {tuple(node.attributes.get_ints("perm", ())) for node in readers if node.op_type == "Transpose"}
        if not readers or len(perms) != 1 or any(node.op_type != "Transpose" for node in readers):
            continue
        perm = perms.pop() or tuple(reversed(range(bound[name].dim())))
        if isinstance(bound[name], Stack) and perm != (0, 2, 1):
            continue
        tensor = bound.pop(name).permute(perm)
        value.shape = ir.Shape(tensor.shape)
        for node in readers:
            node.outputs[0].replace_all_uses_with(value)
            graph.remove(node, safe=True)
        value.name = name + TRANSPOSED_SUFFIX
        bound[value.name] = tensor


def _leave_out_unused_results(graph: ir.Graph) -> None:
    """Leave out means and deviations that no node reads: a result with a name is computed and stored."""
    for node in graph:
        for value in node.outputs[1:] if node.op_type in _NORMS else ():
            if not value.uses() and not value.is_graph_output():
                value.name, value.shape, value.type = "", None, None


def _strip_traces(model: ir.Model) -> None:
    """Remove the engines' notes about their own work (stack traces, source paths), which are not part of the model."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None
    model.graph.metadata_props.clear()
    model.graph.doc_string = None
    model.metadata_props.clear()
    model.doc_string = None
    model.producer_name, model.producer_version = "slipway", own_version()


def declare_interface(model: ir.Model, component: Component) -> None:
    """Check the names of inputs and outputs, and set the usual names and sizes of their axes, in place.

    Raises:
        ONNXExportError: ``EXPORT_ENGINE_FAILED`` if a name is missing: without an input that the engine dropped, the model
            would silently compute something else.
    """
    graph = model.graph
    for have, ports in ((graph.inputs, component.inputs), (graph.outputs, component.outputs)):
        names = [value.name for value in have]
        want = {port.name: port for port in ports}
        if sorted(name or "" for name in names) != sorted(want):
            odd = sorted(set(want).symmetric_difference(name or "" for name in names))
            raise ONNXExportError(
                f"the engine's graph differs from the request in {counted(len(odd), 'input or output', 'inputs or outputs')}, first {odd[0]!r}",
                reason="EXPORT_ENGINE_FAILED",
                remedy="use another engine",
                about={"names": ", ".join(odd[:8])},
            )
        for value in have:
            assert value.name is not None
            if have is graph.inputs and value.name not in component.unread and not value.uses():
                raise ONNXExportError(  # an engine that traces a sample without padding may drop the mask
                    f"the engine's graph does not read its input {value.name!r}",
                    reason="EXPORT_ENGINE_FAILED",
                    remedy="use another engine",
                    about={"names": value.name},
                )
            _set_shape(value, want[value.name].shape)


def axes_of(model: ir.Model) -> dict[str, list[str | int | None]]:
    """Return the axes of each input of a graph: the name of one that varies, the size of one that is fixed."""
    return {
        value.name or "": [axis if isinstance(axis, int) else axis.value for axis in value.shape or ()]
        for value in model.graph.inputs
    }


def _set_shape(value: ir.Value, axes: tuple[str | int | None, ...]) -> None:
    """Name a value's axes; ``None`` keeps the present size."""
    known = value.shape if value.shape is not None and len(value.shape) == len(axes) else [None] * len(axes)
    value.shape = ir.Shape([known[index] if axis is None else axis for index, axis in enumerate(axes)])
