"""Translations of operators of PyTorch that coremltools lacks.

They are registered by an import of this module, in the process of a stage alone.
"""

from __future__ import annotations

from typing import Any

import torch
from coremltools.converters.mil import Builder, register_torch_op
from coremltools.converters.mil.frontend.torch.ops import _get_inputs, promote_input_dtypes
from coremltools.converters.mil.frontend.torch.utils import NUM_TO_TORCH_DTYPE

PLACES = "cache_position"
"""The input that says where keys and values are written: places in a row."""
_LENGTH_AXIS = 2


@register_torch_op
def alias(context: Any, node: Any) -> None:
    """Give a value another name."""
    context.add(Builder.identity(x=_get_inputs(context, node)[0], name=node.name))


@register_torch_op(torch_alias=["where.scalarother"])
def where_number(context: Any, node: Any) -> None:
    """Choose between values and a number."""
    chosen, values, number = _get_inputs(context, node, expected=3)
    values, number = promote_input_dtypes([values, number])
    context.add(Builder.select(cond=chosen, a=values, b=number, name=node.name))


@register_torch_op
def index_copy(context: Any, node: Any) -> None:
    """Write the tokens of a call into the cache, as one slice: their places are in a row.

    Raises:
        ValueError: It is another write than that of a cache.
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


@register_torch_op
def new_ones(context: Any, node: Any) -> None:
    """Give the truth that transformers joins masks with.

    Raises:
        ValueError: It is another tensor of ones.
    """
    dtype = (node.kwinputs or {}).get("dtype")
    if tuple(node.inputs[1]) or not dtype or NUM_TO_TORCH_DTYPE[dtype[0]] != torch.bool:
        raise ValueError("it makes a tensor of ones in its code")
    context.add(Builder.const(val=True, name=node.name))
