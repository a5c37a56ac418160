"""Makers of a tiny model for dense decoders beside the families of Llama, Qwen and Gemma. Data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.models.gguf_sizes import of

DENSE: dict[str, Callable[[], Any]] = {
    "gemma": of("GemmaConfig", "GemmaForCausalLM", head_dim=32),
}
