"""Trace models whose attention has a bias by position (ALiBi), in a form that engines and ONNX Runtime can write and run."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch


def compute_biases(model: Any) -> None:
    """Let MPT and Falcon compute the same bias in another way.

    transformers cuts MPT's from the end of a table of ``max_seq_len`` tokens. A trace fixes where the cut begins, and torch.export would
    limit the number of tokens to the table's. It computes Falcon's in bfloat16, for which ONNX Runtime has no kernels on CPUs.
    """
    if model.config.model_type == "falcon" and model.config.alibi:
        _swap_while_running(model.transformer)
    if model.config.model_type == "mpt":
        for module in model.modules():
            if type(module).__name__ == "MptAttention":
                module.register_forward_pre_hook(_exact_bias, with_kwargs=True)


def _exact_bias(_module: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Replace the table by its last places. position_bias: (heads, 1, table), falling by a slope of each head to 0 at the last place."""
    table, keys = named["position_bias"], named["attention_mask"].shape[-1]
    distances = torch.arange(keys, dtype=table.dtype, device=table.device) - (keys - 1)
    return args, {**named, "position_bias": -table[:, :, -2:-1] * distances}  # (heads, 1, keys)


def _swap_while_running(model: Any) -> None:
    """Replace the function that makes Falcon's bias while this model runs: other models of the class keep it."""
    module: Any = sys.modules[type(model).__module__]
    original = module.build_alibi_tensor
    # At the second place, the bias is the slope of its head, already rounded.
    slopes = original(torch.ones(1, 2, dtype=torch.int64), model.num_heads, torch.float32)[:, 0, 1].clone()

    def put(function: Any, *_: Any) -> None:
        module.build_alibi_tensor = function

    model.register_forward_pre_hook(partial(put, partial(_rounded_bias, slopes)))
    model.register_forward_hook(partial(put, original), always_call=True)


def _rounded_bias(
    slopes: torch.Tensor, attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype
) -> torch.Tensor:
    """Compute in float32 what bfloat16 gives. slopes: (heads), attention_mask: (batch, tokens); result (batch * heads, 1, tokens)."""
    batch, tokens = attention_mask.shape
    places = _rounded((((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, :]).to(torch.float32))
    return _rounded(slopes[None, :, None] * places).reshape(batch * num_heads, 1, tokens).to(dtype)


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """Round to the 8 binary digits of bfloat16 by float32's own rounding (Dekker's splitting)."""
    scaled = values * 65537.0
    return scaled - (scaled - values)
