"""Trace a module, round its weights, delegate what XNNPACK supports, and plan memory for the rest.

Rounding is that of ExecuTorch's own export of language models at ``8da4w``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipway_executorch.loading import check_gelus

TOKENS = "tokens"


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
