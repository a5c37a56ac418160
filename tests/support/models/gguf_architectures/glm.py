"""GLM-4."""

from __future__ import annotations

from support.models.gguf_family import OF_EXPERTS, Family, of
from support.models.gguf_sizes import FIRST_DENSE

FAMILIES = {
    "chatglm": Family(of("GlmConfig", "GlmForCausalLM", head_dim=16), refused=(({"head_dim": 32}, "head_dim"),)),
    "glm4": Family(of("Glm4Config", "Glm4ForCausalLM", head_dim=32, tie_word_embeddings=True)),
    "glm4moe": Family(
        of("Glm4MoeConfig", "Glm4MoeForCausalLM", **FIRST_DENSE, head_dim=32, use_qk_norm=True, attention_bias=True),
        refused=(({"n_group": 2}, "n_group"),),
        untrained=OF_EXPERTS,
    ),
}
