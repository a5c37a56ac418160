"""Defaults that classes in several of the tables share. Data, and light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LLAMA: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
"""Llama, and classes after it."""
QWEN: Mapping[str, Any] = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
QWEN_2: Mapping[str, Any] = {**QWEN, "max_window_layers": 28}
QWEN_3_VL: Mapping[str, Any] = {
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
}
"""Text parts of models that take images."""
GRANITE: Mapping[str, Any] = {
    **LLAMA,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
GRANITE_EXPERTS: Mapping[str, Any] = {**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2}
