"""Llama."""

from __future__ import annotations

from support.models.gguf_family import Family, of
from support.models.gguf_sizes import LINEAR, LLAMA3

FAMILIES = {
    "llama": Family(of("LlamaConfig", "LlamaForCausalLM"), fast=True),
    "llama3": Family(of("LlamaConfig", "LlamaForCausalLM", rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama-linear-bias": Family(
        of("LlamaConfig", "LlamaForCausalLM", rope_parameters=LINEAR, attention_bias=True, mlp_bias=True)
    ),
}
