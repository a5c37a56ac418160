"""GPT-NeoX."""

from __future__ import annotations

from support.models.gguf_family import BY_TABLE, Family, of

FAMILIES = {
    "gptneox": Family(
        of("GPTNeoXConfig", "GPTNeoXForCausalLM"),
        refused=(({"tie_word_embeddings": True}, "tie_word_embeddings"),),
        most=BY_TABLE,
        fast=True,
    ),
    "gptneox-sequential": Family(of("GPTNeoXConfig", "GPTNeoXForCausalLM", use_parallel_residual=False), most=BY_TABLE),
}
