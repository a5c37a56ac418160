"""Trace a module and convert the trace to a Core ML program, with attention and operators in the forms that Core ML has.

Attention is Core ML's own operator, with a mask that is added and fits in half precision. Operators of PyTorch that coremltools
lacks are registered by an import of this module, in the process of a stage alone.

Axes: H = heads of queries, G = heads of keys and values, S = tokens of this call, L = places of keys, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil import Builder, register_torch_op
from coremltools.converters.mil.frontend.torch.ops import _get_inputs, promote_input_dtypes
from coremltools.converters.mil.frontend.torch.utils import NUM_TO_TORCH_DTYPE
from torch.nn.functional import scaled_dot_product_attention

from slipway.model.pytorch.traced_forms import use_attention
from slipway_coreml.params import Precision

TARGET = ct.target.iOS18
"""The oldest systems that run a package: iOS 18 and macOS 15, the first with states and grouped 4-bit weights."""
TOKENS = "tokens"
_STEEP = ("cos", "sin", "rsqrt")
"""Operators whose arguments need float32: the angle of a late position, and a mean of squares above 65,504."""
_WIDE = (
    "add",
    "mul",
    "pow",
    "square",
    "reduce_mean",
    "matmul",
    "cast",
    "expand_dims",
    "transpose",
    "reshape",
    "concat",
)
"""Operators that are computed in float32 too if they lead to a steep one."""
_STEPS = 8

PLACES = "cache_position"
"""The input with the positions at which keys and values are written; they are consecutive."""
_LENGTH_AXIS = 2

NAME = "slipway_coreml"
_UNREAD = ("deterministic", "token_type_ids")
LOWEST = -3e4
"""Score that hides a key: the key's weight is zero, and the sum with another score stays within half precision."""


def trace(module: torch.nn.Module, sample: tuple[torch.Tensor, ...], most: int) -> Any:
    """Trace a module by torch.export; its inputs have 1 to ``most`` tokens on their last axis."""
    axis = torch.export.Dim(TOKENS, min=1, max=most)
    shapes = tuple({value.dim() - 1: axis} for value in sample)
    with torch.no_grad():
        traced = torch.export.export(module, sample, dynamic_shapes=shapes, strict=False)
        program = traced.run_decompositions({})
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.__and__.Tensor and node.meta["val"].dtype is torch.bool:
            node.target = torch.ops.aten.logical_and.default  # the name that coremltools knows
    return program


def convert(traced: Any, outputs: Sequence[str], precision: Precision) -> Any:
    """Convert a trace to a Core ML model with outputs of these names.

    Buffers that the trace writes become states.
    """
    halves = precision == "float16"
    return ct.convert(
        traced,
        convert_to="mlprogram",
        minimum_deployment_target=TARGET,
        compute_precision=ct.transform.FP16ComputePrecision(can_use_half) if halves else ct.precision.FLOAT32,
        outputs=[ct.TensorType(name=name, dtype=np.float16 if halves else np.float32) for name in outputs],
        skip_model_load=True,
    )


def can_use_half(operation: Any) -> bool:
    """Return whether an operation may be computed in half precision: it may not if its result leads to a steep operator."""
    return not _leads_to_steep(operation, _STEPS)


def _leads_to_steep(operation: Any, steps: int) -> bool:
    if operation.op_type in _STEEP:
        return True
    if not steps or operation.op_type not in _WIDE:
        return False
    uses = [use for output in operation.outputs for use in output.child_ops]
    return bool(uses) and all(_leads_to_steep(use, steps - 1) for use in uses)


@register_torch_op  # type: ignore[untyped-decorator]
def alias(context: Any, node: Any) -> None:
    """Give a value another name."""
    context.add(Builder.identity(x=_get_inputs(context, node)[0], name=node.name))


@register_torch_op(torch_alias=["where.scalarother"])  # type: ignore[untyped-decorator]
def where_number(context: Any, node: Any) -> None:
    """Choose between values and a number."""
    chosen, values, number = _get_inputs(context, node, expected=3)
    values, number = promote_input_dtypes([values, number])
    context.add(Builder.select(cond=chosen, a=values, b=number, name=node.name))


@register_torch_op  # type: ignore[untyped-decorator]
def index_copy(context: Any, node: Any) -> None:
    """Write the tokens of a call into the cache as one slice: their positions are consecutive.

    Raises:
        ValueError: The operation writes something other than a cache.
    """
    cache, axis, places, tokens = _get_inputs(context, node, expected=4)
    if axis.val != _LENGTH_AXIS or cache.rank != 4 or node.inputs[2] != PLACES:
        raise ValueError("it copies rows by index, which Core ML does only for a cache")
    first = Builder.slice_by_size(x=places, begin=[0], size=[1])
    behind = Builder.add(x=first, y=Builder.shape(x=places))
    cache, tokens = promote_input_dtypes([cache, tokens])
    written = Builder.slice_update(
        x=cache,
        update=tokens,
        begin=Builder.concat(values=[[0, 0], first, [0]], axis=0),
        end=Builder.concat(values=[list(cache.shape[:2]), behind, [cache.shape[3]]], axis=0),
        name=node.name,
    )
    context.add(written)


@register_torch_op  # type: ignore[untyped-decorator]
def new_ones(context: Any, node: Any) -> None:
    """Convert the ``True`` with which transformers combines masks.

    Raises:
        ValueError: It is another tensor of ones.
    """
    dtype = (node.kwinputs or {}).get("dtype")
    if tuple(node.inputs[1]) or not dtype or NUM_TO_TORCH_DTYPE[dtype[0]] != torch.bool:
        raise ValueError("it makes a tensor of ones in its code")
    context.add(Builder.const(val=True, name=node.name))


def use_core_attention(model: Any) -> None:
    """Make a model use :func:`attend`, unless its class computes attention itself."""
    use_attention(model, NAME, attend, mask=added_mask, unread=_UNREAD)


def added_mask(
    batch_size: int,  # noqa: ARG001 - a call has one row
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **_: Any,
) -> torch.Tensor:
    """Return a mask to add to scores, (1, 1, S, L), or (1, 1, 1, L) if all tokens see the same keys."""
    places, keys = torch.arange(q_length) + q_offset, torch.arange(kv_length) + kv_offset
    seen = mask_function(0, 0, places[:, None], keys[None])
    if attention_mask is not None:
        seen = seen & attention_mask.bool()
    return (1 - seen.to(dtype))[None, None] * LOWEST


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend. query: (1, H, S, D); key, value: (1, G, L, D); attention_mask: (1, 1, S, L), added; result (1, S, H, D)."""
    share = query.shape[1] // key.shape[1]
    if share > 1:
        # This makes one copy; coremltools turns repeat_interleave into four.
        key, value = (
            each[:, :, None].expand(-1, -1, share, -1, -1).flatten(1, 2) for each in (key, value)
        )  # (1, H, L, D)
    usual = query.shape[3] ** -0.5
    scale = usual if scaling is None else scaling
    if softcap is None:
        # coremltools uses Core ML's own operator only without a scale.
        query = query if scale == usual else query * (scale / usual)
        result = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
    else:
        scores = torch.tanh(query @ key.transpose(2, 3) * (scale / softcap)) * softcap  # (1, H, S, L)
        if attention_mask is not None:
            scores = scores + attention_mask
        result = torch.softmax(scores, dim=-1) @ value
    return result.transpose(1, 2)
