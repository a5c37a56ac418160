"""SmolLM3."""

from __future__ import annotations

from support.models.gguf_family import Family, of

FAMILIES = {
    "smollm3": Family(of("SmolLM3Config", "SmolLM3ForCausalLM", num_hidden_layers=5, tie_word_embeddings=True)),
}
