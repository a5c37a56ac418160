"""Falcon-H1."""

from __future__ import annotations

from typing import Any

from support.models.gguf_family import Family, of

_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}

FAMILIES = {
    "falcon-h1": Family(
        of(
            "FalconH1Config",
            "FalconH1ForCausalLM",
            **_MAMBA,
            mamba_d_ssm=128,
            head_dim=32,
            key_multiplier=0.7,
            attention_in_multiplier=1.3,
            attention_out_multiplier=0.9,
            ssm_in_multiplier=1.2,
            ssm_out_multiplier=0.8,
            ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
            mlp_multipliers=[0.8, 1.25],
            embedding_multiplier=5.0,
            lm_head_multiplier=0.6,
        ),
        refused=(
            ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate"),
            ({"projectors_bias": True}, "projectors_bias"),
        ),
        untrained=("out_proj",),
    ),
}
