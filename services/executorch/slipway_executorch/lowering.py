"""Trace a module, give XNNPACK what it takes of the graph, and plan memory for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipway_executorch.layers import check_gelus

TOKENS = "tokens"


@dataclass(frozen=True)
class Lowered:
    """A program and what is known of it.

    Attributes:
        program: ExecuTorch's manager of the program, which writes it.
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
    """Return torch's program of a module whose inputs have 1 to ``most`` tokens on their last axis.

    Raises:
        ValueError: XNNPACK would compute something else.
    """
    axis = torch.export.Dim(TOKENS, min=1, max=most)
    shapes = tuple({value.dim() - 1: axis} for value in sample)
    with torch.no_grad():
        traced = torch.export.export(module, sample, dynamic_shapes=shapes, strict=False)
    check_gelus(traced.graph_module)
    return traced


def lower(traced: Any, constants: Mapping[str, Any], *, rounded: bool) -> Lowered:
    """Return the program of a trace, with methods that return constants; ``rounded`` if its weights are integers."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
        XnnpackDynamicallyQuantizedPartitioner,
        XnnpackPartitioner,
    )
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower

    # Products of integers first, each in a part of its own: XNNPACK fuses the rounding of their inputs only so.
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
        # Without the second, each call copies the whole cache to write a few places of it.
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
    """Return the number of calls of each operator in a plan of execution."""
    calls = [instruction.instr_args for chain in plan.chains for instruction in chain.instructions]
    names = [plan.operators[call.op_index].name for call in calls if hasattr(call, "op_index")]
    return dict(sorted(Counter(names).items()))
