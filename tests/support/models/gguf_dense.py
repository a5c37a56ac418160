"""Makers of a tiny model for dense decoders beside the families of Llama, Qwen and Gemma. Data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.models.gguf_sizes import of

DENSE: dict[str, Callable[[], Any]] = {
    "gemma": of("GemmaConfig", "GemmaForCausalLM", head_dim=32),
    "command-r": of("CohereConfig", "CohereForCausalLM", logit_scale=0.3),
    "command-r-plus": of("CohereConfig", "CohereForCausalLM", logit_scale=0.3, use_qk_norm=True, num_hidden_layers=64),
    "cohere2": of("Cohere2Config", "Cohere2ForCausalLM", logit_scale=0.3, num_hidden_layers=5, sliding_window=16),
}
