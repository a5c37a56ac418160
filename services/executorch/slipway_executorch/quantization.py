"""Round weights as ExecuTorch's own export of language models does at ``8da4w``."""

from __future__ import annotations

from typing import Any

import torch


def round_weights(model: Any, group_size: int) -> tuple[str, ...]:
    """Give linear layers 4-bit weights in groups and 8-bit inputs, and the embedding of tokens 8-bit rows in groups.

    Returns:
        Names of the layers that keep float32: their rows cannot be divided into groups.
    """
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    kept, table = layers_in_float32(model, group_size), model.get_input_embeddings()
    table.padding_idx = None  # it matters in training only, and ExecuTorch's patterns of rounded embeddings lack it
    # The head may share its weight with the table. Each gets integers of its own.
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
    """Return the names of the linear layers, and of the embedding of tokens, whose rows cannot be divided into groups."""
    widths = {
        name: layer.in_features if _is_linear(layer) else layer.embedding_dim
        for name, layer in model.named_modules()
        if _is_linear(layer) or layer is model.get_input_embeddings()
    }
    return tuple(sorted(name for name, width in widths.items() if width % group_size))


def _is_linear(layer: torch.nn.Module) -> bool:
    return isinstance(layer, torch.nn.Linear)
