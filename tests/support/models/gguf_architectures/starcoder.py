"""StarCoder."""

from __future__ import annotations

from support.models.gguf_family import BY_TABLE, Family, of

FAMILIES = {
    "starcoder": Family(
        of("GPTBigCodeConfig", "GPTBigCodeForCausalLM", n_inner=96),
        refused=(({"activation_function": "relu"}, "activation_function"),),
        most=BY_TABLE,
    ),
    "starcoder-all-heads": Family(
        of("GPTBigCodeConfig", "GPTBigCodeForCausalLM", n_inner=96, multi_query=False), most=BY_TABLE
    ),
    "starcoder2": Family(
        of("Starcoder2Config", "Starcoder2ForCausalLM"), refused=(({"use_bias": False}, "use_bias"),), most=BY_TABLE
    ),
}
