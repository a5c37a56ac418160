"""Architectures with attention in all layers, no experts, and layer norms, which subtract the mean. Data, and light.

Sources: llama.cpp's ``conversion/`` (``command_r.py``, ``olmo.py``, ``phi.py``, ``gpt2.py``, ``nemotron.py``, ``falcon.py``, ``jais.py``) and
``src/models/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from slipway_gguf.architectures.entry import CONFIG_VALUES, Architecture, Key, Numbers, Piece, Target, local_layers
from slipway_gguf.architectures.refusals import (
    first_of,
    other_attention,
    other_head_norms,
    other_width,
    unlisted_windows,
)
from slipway_gguf.architectures.settings import GELU, SILU, SILU_WITHOUT_BIAS, TIED, UNTIED
from slipway_gguf.architectures.views import in_groups


def _heads_apart(numbers: Numbers) -> tuple[Piece, ...]:
    """Return queries, keys and values of all heads behind each other; the model has so those of the heads that share keys."""
    groups, width = numbers.decoder.kv_heads, numbers.decoder.width
    queries = numbers.decoder.heads // groups * width
    ends = (0, queries, queries + width, queries + 2 * width)
    return tuple(Piece(rows=in_groups(groups, first, end)) for first, end in pairwise(ends))


def _without_transformer(name: str) -> str:
    """Return a tensor's name without the beginning that some checkpoints lack."""
    return name.removeprefix("transformer.")


_FOUR_TIMES: Mapping[str, Key] = {"feed_forward_length": lambda numbers: 4 * numbers.decoder.hidden}
"""The class has no setting for the width of the feed-forward network."""


def _clamp(numbers: Numbers) -> float | None:
    """Return the largest value of queries, keys and values; None if there is no limit."""
    attention = numbers.decoder.settings.get("attn_config")
    return CONFIG_VALUES.optional_number(attention, "clip_qkv") if isinstance(attention, Mapping) else None


_MPT: Mapping[str, Key] = {
    **_FOUR_TIMES,
    "attention.max_alibi_bias": lambda _: 8.0,  # the class has no other, whatever settings say
    "attention.clamp_kqv": _clamp,
}

_OLMO_EPSILON = 1e-5
"""OLMo's own code has this number, and no setting for it."""

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
        refuses=first_of(other_width, other_head_norms),
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
        refuses=first_of(other_width, unlisted_windows),
    ),
    Architecture(
        "olmo",
        "OlmoForCausalLM",
        assumes=SILU_WITHOUT_BIAS,
        paired=True,
        keys={
            "attention.layer_norm_epsilon": lambda _: _OLMO_EPSILON,
            "attention.clamp_kqv": lambda numbers: numbers.optional_number("clip_qkv"),
        },
        needs=("token_embd.weight",),
        refuses=other_width,
    ),
    Architecture(
        "phi2",
        "PhiForCausalLM",
        assumes={**GELU, **UNTIED, "qk_layernorm": (False,)},
        partial=True,
        refuses=other_width,
    ),
    Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        assumes={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        rope=(),
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    ),
    Architecture(
        "gptneox",
        "GPTNeoXForCausalLM",
        assumes={**GELU, **UNTIED, "attention_bias": (True,)},
        partial=True,
        tensors={
            f"attention.query_key_value.{end}": (Target(f"attn_qkv.{end}", _heads_apart),) for end in ("weight", "bias")
        },
        keys={"use_parallel_residual": lambda numbers: numbers.flag("use_parallel_residual")},
        refuses=other_width,
    ),
    Architecture(
        "starcoder",
        "GPTBigCodeForCausalLM",
        assumes={
            "activation_function": GELU["hidden_act"],
            "scale_attn_weights": (True,),
            "add_cross_attention": (False,),
        },
        rope=(),
        tensors={f"attn.c_attn.{end}": (Target(f"attn_qkv.{end}", _heads_apart),) for end in ("weight", "bias")},
    ),
    Architecture("starcoder2", "Starcoder2ForCausalLM", assumes={**GELU, "use_bias": (True,)}, refuses=other_width),
    Architecture(
        "bloom",
        "BloomForCausalLM",
        assumes={"apply_residual_connection_post_layernorm": (False,)},
        rope=(),
        rename=_without_transformer,
        tensors={
            f"self_attention.query_key_value.{end}": (Target(f"attn_qkv.{end}", _heads_apart),)
            for end in ("weight", "bias")
        },
        keys=_FOUR_TIMES,
    ),
    Architecture(
        "falcon",
        "FalconForCausalLM",
        assumes={
            "activation": GELU["hidden_act"],
            "alibi": (False,),
            "bias": (False,),
            "parallel_attn": (True,),
        },
        tensors={"self_attention.query_key_value.weight": (Target("attn_qkv.weight", _heads_apart),)},
        refuses=other_width,
    ),
    Architecture(
        "mpt",
        "MptForCausalLM",
        assumes={"no_bias": (True,), "logit_scale": ()},
        exact_gelu=True,
        rope=(),
        keys=_MPT,
        refuses=other_attention,
    ),
    Architecture(
        "stablelm",
        "StableLmForCausalLM",
        assumes={**SILU, **UNTIED},
        partial=True,
        stacks={
            "self_attn.q_layernorm.norms.": "attn_q_norm.weight",
            "self_attn.k_layernorm.norms.": "attn_k_norm.weight",
        },
        refuses=other_width,
    ),
    Architecture(
        "nemotron",
        "NemotronForCausalLM",
        assumes={**UNTIED, "hidden_act": ("relu2",)},
        partial=True,
        refuses=other_width,
    ),
    Architecture(
        "jais2",
        "Jais2ForCausalLM",
        assumes={**UNTIED, "hidden_act": ("relu2",), "attention_bias": (True,), "mlp_bias": (True,)},
    ),
)
"""In the order in which they are named to users."""
