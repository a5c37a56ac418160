"""gpt-oss."""

from __future__ import annotations

from support.models.gguf_family import Family, of
from support.models.gguf_sizes import YARN

FAMILIES = {
    "gpt-oss": Family(
        of(
            "GptOssConfig",
            "GptOssForCausalLM",
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=32,
            sliding_window=16,
            num_hidden_layers=4,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        refused=(
            ({"swiglu_limit": 5.0}, "swiglu_limit"),
            ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ),
    ),
    "gpt-oss-yarn": Family(
        of(
            "GptOssConfig",
            "GptOssForCausalLM",
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=32,
            sliding_window=16,
            num_hidden_layers=4,
            rope_parameters={**YARN, "truncate": True},
        )
    ),
}
