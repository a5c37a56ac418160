"""Falcon Mamba."""

from __future__ import annotations

from support.models.gguf_family import EXACT, Family, of

_SIZES = {"state_size": 16, "num_hidden_layers": 3, "intermediate_size": 128}

FAMILIES = {
    "falcon-mamba": Family(
        of("FalconMambaConfig", "FalconMambaForCausalLM", **_SIZES, mixer_rms_eps=1e-5),
        refused=(
            ({"expand": 3}, "expand"),
            ({"use_conv_bias": False}, "use_conv_bias"),
        ),
        untrained=("out_proj", "dt_proj"),
    ),
    "falcon-mamba-as-released": Family(
        of("FalconMambaConfig", "FalconMambaForCausalLM", **_SIZES),
        untrained=("out_proj", "dt_proj"),
        most=30 * EXACT,  # llama.cpp has one epsilon for all norms: 4.2e-4 was found on a processor without AVX-512
    ),
}
