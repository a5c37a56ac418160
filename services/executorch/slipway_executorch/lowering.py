"""Load a merged model in float32 as XNNPACK can compute it, trace it, round its weights, delegate it, and plan memory.

XNNPACK gets what it supports; memory is planned for the rest. Attention is matrix products of keys and values as they are stored, and
a mask that is added. Rounding is that of ExecuTorch's own export of language models at ``8da4w``.

Axes: H = heads of queries, G = heads of keys and values, S = tokens of this call, L = places of keys, D = width of a head.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.activations import GELUTanh

from slipway.errors import ExecutorchExportError
from slipway.model.pytorch.text_model import TextModel, open_text_model, use_linear_layers
from slipway.model.pytorch.traced_forms import use_attention
from slipway_executorch.params import PRODUCT

ATTENTION_NAME = "slipway_grouped"

TOKENS = "tokens"


def open_source(folder: Path) -> TextModel:
    """Load the model of a folder, with attention and layers that XNNPACK can compute.

    Raises:
        ExecutorchExportError: ``FAMILY_UNSUPPORTED``, ``DTYPE_UNSUPPORTED`` (its weights are quantized), ``BASE_MODEL_INVALID``.
    """
    source = open_text_model(
        folder, lambda config: config.why_no_text_graph(PRODUCT), title="ExecuTorch", error=ExecutorchExportError
    )
    use_attention(source.model, ATTENTION_NAME, attend)
    replace_layers(source.model)
    return source


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend without copying keys and values for each head of queries that shares them.

    query: (1, H, S, D); key, value: (1, G, L, D); attention_mask: (1, 1, S, L), added; result (1, S, H, D).
    """
    tokens, width, groups = query.shape[2], query.shape[3], key.shape[1]
    share = query.shape[1] // groups
    scale = width**-0.5 if scaling is None else scaling
    # Only flatten and unflatten here: torch.export cannot prove that other reshapes hold for any S.
    queries = (query.flatten(0, 1) * scale).contiguous().unflatten(0, (groups, share)).flatten(1, 2)  # (G, H/G · S, D)
    scores = torch.bmm(queries, key.flatten(0, 1).transpose(1, 2))  # (G, H/G · S, L)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.unflatten(1, (share, tokens)).flatten(0, 1)  # (H, S, L)
    if attention_mask is not None:
        scores = scores + attention_mask.flatten(0, 1)
    weights = torch.softmax(scores, dim=-1).unflatten(0, (groups, share)).flatten(1, 2)
    result = torch.bmm(weights, value.flatten(0, 1)).unflatten(1, (share, tokens)).flatten(0, 1)  # (H, S, D)
    return result.transpose(0, 1).unsqueeze(0)


class TanhGelu(torch.nn.Module):
    """GELU's tanh approximation, in separate operators."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``. Source: GELU, arXiv 1606.08415, section 2."""
        inner = math.sqrt(2 / math.pi) * (values + 0.044715 * values * values * values)
        return 0.5 * values * (1 + torch.tanh(inner))


def replace_layers(model: Any) -> None:
    """Replace GELUs that use tanh by :class:`TanhGelu`, and GPT-2's layers by linear ones, which alone are rounded and fused."""
    use_linear_layers(model)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, GELUTanh) or (isinstance(layer, torch.nn.GELU) and layer.approximate == "tanh"):
                setattr(parent, name, TanhGelu())


def check_gelus(graph: torch.fx.GraphModule) -> None:
    """Refuse a graph that still has a tanh GELU: ExecuTorch 1.5 silently gives it to XNNPACK as an exact GELU.

    Raises:
        ValueError: The graph has one.
    """
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.gelu.default and node.kwargs.get("approximate", "none") != "none":
            raise ValueError("it computes GELU by tanh within its code, which XNNPACK would compute as the exact one")


@dataclass(frozen=True)
class Lowered:
    """A program and its statistics.

    Attributes:
        program: ExecuTorch's program manager, which writes the file.
        delegated: Number of nodes that XNNPACK runs.
        subgraphs: Number of parts that they form.
        operators: Number of nodes of each operator that ExecuTorch's own kernels run.
        planned_bytes: Memory that the runtime allocates for values and caches.
    """

    program: Any
    delegated: int
    subgraphs: int
    operators: Mapping[str, int]
    planned_bytes: int


def trace(module: torch.nn.Module, sample: tuple[torch.Tensor, ...], most: int) -> Any:
    """Trace a module by torch.export; its inputs have 1 to ``most`` tokens on their last axis.

    Raises:
        ValueError: XNNPACK would compute a GELU of it wrongly.
    """
    axis = torch.export.Dim(TOKENS, min=1, max=most)
    shapes = tuple({value.dim() - 1: axis} for value in sample)
    with torch.no_grad():
        traced = torch.export.export(module, sample, dynamic_shapes=shapes, strict=False)
    check_gelus(traced.graph_module)
    return traced


def lower(traced: Any, constants: Mapping[str, Any], *, rounded: bool) -> Lowered:
    """Lower a trace to a program with methods that return constants; ``rounded`` if its weights are integers."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
        XnnpackDynamicallyQuantizedPartitioner,
        XnnpackPartitioner,
    )
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower

    # Partition integer products first, each alone: only then does XNNPACK fuse the rounding of their inputs.
    first = [XnnpackDynamicallyQuantizedPartitioner()] if rounded else []
    edge = to_edge_transform_and_lower(
        traced,
        partitioner=[*first, XnnpackPartitioner()],
        constant_methods=dict(constants),
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    parts = [
        each.original_module
        for each in edge.exported_program().graph_module.children()
        if hasattr(each, "original_module")
    ]
    program = edge.to_executorch(
        # Without run_reinplace_pass, each call copies the whole cache to write a few positions.
        ExecutorchBackendConfig(do_quant_fusion_and_const_prop=rounded, run_reinplace_pass=True)
    )
    plan = next(each for each in program.executorch_program.execution_plan if each.name == "forward")
    return Lowered(
        program,
        delegated=sum(node.op == "call_function" for part in parts for node in part.graph.nodes),
        subgraphs=len(parts),
        operators=_operators(plan),
        planned_bytes=sum(plan.non_const_buffer_sizes),
    )


def _operators(plan: Any) -> dict[str, int]:
    """Count the calls of each operator in an execution plan."""
    calls = [instruction.instr_args for chain in plan.chains for instruction in chain.instructions]
    names = [plan.operators[call.op_index].name for call in calls if hasattr(call, "op_index")]
    return dict(sorted(Counter(names).items()))


def round_weights(model: Any, group_size: int) -> tuple[str, ...]:
    """Round linear layers to grouped 4-bit weights with 8-bit inputs, and the token embedding to grouped 8-bit rows.

    Returns:
        Names of the layers that keep float32: their rows cannot be divided into groups.
    """
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    kept, table = layers_in_float32(model, group_size), model.get_input_embeddings()
    table.padding_idx = None  # it matters in training only, and ExecuTorch's patterns of rounded embeddings lack it
    # The head may share its weight with the table; each is rounded separately.
    if table.embedding_dim % group_size == 0:
        quantize_(
            model,
            IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerGroup(group_size)),
            filter_fn=lambda layer, _: layer is table,
        )
    quantize_(
        model,
        Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined] # torch's stubs lack it
            weight_granularity=PerGroup(group_size),
            intx_choose_qparams_algorithm="hqq_scale_only",
        ),
        filter_fn=lambda layer, _: _is_linear(layer) and layer.in_features % group_size == 0,
    )
    return kept


def layers_in_float32(model: Any, group_size: int) -> tuple[str, ...]:
    """Return the linear layers, and the token embedding, whose rows cannot be divided into groups."""
    widths = {
        name: layer.in_features if _is_linear(layer) else layer.embedding_dim
        for name, layer in model.named_modules()
        if _is_linear(layer) or layer is model.get_input_embeddings()
    }
    return tuple(sorted(name for name, width in widths.items() if width % group_size))


def _is_linear(layer: torch.nn.Module) -> bool:
    return isinstance(layer, torch.nn.Linear)
