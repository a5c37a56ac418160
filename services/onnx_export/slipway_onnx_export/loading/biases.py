"""Trace models whose attention has a bias by position: compute it for as many tokens as there are, instead of cutting it from a table."""

from __future__ import annotations

from typing import Any

import torch


def compute_biases(model: Any) -> None:
    """Let MPT compute its bias (ALiBi) for the tokens of a call.

    transformers cuts it from the end of a table of ``max_seq_len`` tokens. A trace fixes where the cut begins, and torch.export would
    limit the number of tokens to the table's.
    """
    if model.config.model_type == "mpt":
        for module in model.modules():
            if type(module).__name__ == "MptAttention":
                module.register_forward_pre_hook(_exact_bias, with_kwargs=True)


def _exact_bias(_module: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Replace the table by its last places. position_bias: (heads, 1, table), falling by a slope of each head to 0 at the last place."""
    table, keys = named["position_bias"], named["attention_mask"].shape[-1]
    distances = torch.arange(keys, dtype=table.dtype, device=table.device) - (keys - 1)
    return args, {**named, "position_bias": -table[:, :, -2:-1] * distances}  # (heads, 1, keys)
