"""What every engine's graph goes through before its weights are written: shared weights, folded transposes, names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

import onnx_ir as ir
import torch

from slipway.errors import ONNXExportError
from slipway_onnx_export.source import ModelSource

# A weight stored transposed, (in, out) instead of PyTorch's (out, in), carries this after its PyTorch name.
TRANSPOSED_SUFFIX = ".T"

BATCH, SEQUENCE, PAST, TOTAL = "batch", "sequence", "past_sequence", "total_sequence"


def settle(model: ir.Model, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bring an engine's graph into the form that is written, in place.

    Equal weights become one initializer; ``MatMul(x, Transpose(W))`` becomes a MatMul with W stored transposed, unless
    something else reads W too (a tied embedding), which keeps its Transpose.

    Returns:
        The tensor of every initializer without a value, in the order in which they are written.

    Raises:
        ONNXExportError: ``EXPORT_ENGINE_FAILED`` when the graph wants a weight that the model does not have or has in
            another shape.
    """
    graph = model.graph
    bound = {name: weights[name] for name, value in graph.initializers.items() if _unbound(value) and name in weights}
    missing = sorted(name for name, value in graph.initializers.items() if _unbound(value) and name not in weights)
    if missing:
        raise ONNXExportError(
            f"the graph wants {len(missing)} weights that the model does not have, first {missing[0]!r}",
            reason="EXPORT_ENGINE_FAILED",
            remedy="use another engine",
            about={"tensor": missing[0], "missing": len(missing)},
        )
    for name, tensor in bound.items():
        _check_shape(graph.initializers[name], tensor)
    _share_equal(graph, bound)
    _fold_transposes(graph, bound)
    _strip_traces(model)
    return bound


def _unbound(value: ir.Value) -> bool:
    return value.const_value is None


def _check_shape(value: ir.Value, tensor: torch.Tensor) -> None:
    shape = [int(dim) if isinstance(dim, int) else -1 for dim in value.shape or ()]
    if shape != list(tensor.shape):
        raise ONNXExportError(
            f"the graph wants {value.name!r} as {shape}, the model has it as {list(tensor.shape)}",
            reason="EXPORT_ENGINE_FAILED",
            remedy="check the model's config.json, or use another engine",
            about={"tensor": value.name, "expected": shape, "found": list(tensor.shape)},
        )


def _share_equal(graph: ir.Graph, bound: dict[str, torch.Tensor]) -> None:
    """Let initializers that are views of the same bytes be one, the first."""
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for name in list(bound):
        tensor = bound[name]
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        keeper = first.setdefault(key, name)
        if keeper != name:
            graph.initializers[name].replace_all_uses_with(graph.initializers[keeper])
            del graph.initializers[name]
            del bound[name]


def _fold_transposes(graph: ir.Graph, bound: dict[str, torch.Tensor]) -> None:
    """Store a weight transposed when all that reads it is one kind of Transpose."""
    for name in list(bound):
        value = graph.initializers[name]
        readers = [use.node for use in value.uses()]
        perms = {tuple(node.attributes.get_ints("perm", ())) for node in readers if node.op_type == "Transpose"}
        if not readers or len(perms) != 1 or any(node.op_type != "Transpose" for node in readers):
            continue
        perm = perms.pop() or tuple(reversed(range(bound[name].dim())))
        tensor = bound.pop(name).permute(perm)
        value.shape = ir.Shape(tensor.shape)
        for node in readers:
            node.outputs[0].replace_all_uses_with(value)
            graph.remove(node, safe=True)
        value.name = name + TRANSPOSED_SUFFIX
        bound[value.name] = tensor


def _strip_traces(model: ir.Model) -> None:
    """Remove what engines note about their own work (stack traces, source paths): it is not part of the model."""
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
    model.producer_name, model.producer_version = "slipway", version("slipway")


def declare_interface(model: ir.Model, source: ModelSource, *, dynamic_axes: bool) -> None:
    """Check the names of inputs and outputs, and give their axes the field's names and sizes, in place.

    Raises:
        ONNXExportError: ``EXPORT_ENGINE_FAILED`` when a name is missing: an input that the engine dropped would silently
            change what the model computes.
    """
    graph = model.graph
    layers = int(source.config.get_text_config(decoder=True).num_hidden_layers)
    batch: str | int = BATCH if dynamic_axes else 1
    pairs = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    inputs: dict[str, list[str | int | None]] = {
        "input_ids": [batch, SEQUENCE],
        "attention_mask": [batch, TOTAL],
        "position_ids": [batch, SEQUENCE],
        **{f"past_key_values.{pair}": [batch, None, PAST, None] for pair in pairs},
    }
    outputs: dict[str, list[str | int | None]] = {
        "logits": [batch, SEQUENCE, None],
        **{f"present.{pair}": [batch, None, TOTAL, None] for pair in pairs},
    }
    for have, want in ((graph.inputs, inputs), (graph.outputs, outputs)):
        names = [value.name for value in have]
        if sorted(name or "" for name in names) != sorted(want):
            odd = sorted(set(want).symmetric_difference(name or "" for name in names))
            raise ONNXExportError(
                f"the engine's graph differs from what was asked for in {len(odd)} inputs or outputs, first {odd[0]!r}",
                reason="EXPORT_ENGINE_FAILED",
                remedy="use another engine",
                about={"names": ", ".join(odd[:8])},
            )
        for value in have:
            _set_shape(value, want[value.name or ""])


def _set_shape(value: ir.Value, axes: list[str | int | None]) -> None:
    """Name a value's axes; ``None`` keeps the size that is there."""
    known = value.shape if value.shape is not None and len(value.shape) == len(axes) else [None] * len(axes)
    value.shape = ir.Shape([known[index] if axis is None else axis for index, axis in enumerate(axes)])
