"""Architectures with attention in all layers and layer norms, which subtract the mean. Data, and light.

Sources: llama.cpp's ``conversion/command_r.py``, and ``src/models/``.
"""

from __future__ import annotations

from slipway_gguf.architectures.entry import Architecture, local_layers
from slipway_gguf.architectures.refusals import other_head_norms, unlisted_windows
from slipway_gguf.architectures.settings import SILU_WITHOUT_BIAS, TIED

LAYER_NORM: tuple[Architecture, ...] = (
    Architecture(
        "command-r",
        "CohereForCausalLM",
        assumes={**SILU_WITHOUT_BIAS, **TIED},
        rope=("default",),
        keys={
            "logit_scale": lambda numbers: numbers.number("logit_scale"),
            # Older files name the length of the trained texts so, and a shorter one as usual.
            "context_length": lambda numbers: numbers.whole("model_max_length", "max_position_embeddings"),
        },
        refuses=other_head_norms,
    ),
    Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        assumes={**SILU_WITHOUT_BIAS, **TIED},
        rope=("default",),
        has_windows=True,
        keys={
            "logit_scale": lambda numbers: numbers.number("logit_scale"),
            "attention.sliding_window_pattern": local_layers,
        },
        refuses=unlisted_windows,
    ),
)
"""In the order in which they are named to users."""
