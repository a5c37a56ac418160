"""Architectures of the Gemma family, with experts (Gemma 4) and without. Data, and light.

In Gemma 4, layers with full attention have heads of another width than those with a window.
Sources: llama.cpp's ``conversion/gemma.py``, ``src/models/gemma*.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from slipway.model.decoders.classes import CLASSES
from slipway.model.decoders.decoder import LOCAL
from slipway.model.decoders.decoder_class import DecoderClass, Local, Windowed
from slipway.model.limits import MOST_PARTS
from slipway_gguf.architectures.entry import (
    CONFIG_VALUES,
    WHOLE,
    Architecture,
    Key,
    Numbers,
    Piece,
    Target,
    local_layers,
)
from slipway_gguf.architectures.refusals import other_gemma_3n, other_gemma_4, other_windows
from slipway_gguf.architectures.settings import EXPERTS, GELU, TIED, Assumed
from slipway_gguf.architectures.views import first_row

_UNTURNED = 1e30
"""Divisor of a frequency that makes it zero: llama.cpp turns whole heads, and transformers a share of each."""


def _of_full_layers(numbers: Numbers, key: str) -> int | None:
    """Return a size of the layers with full attention, as transformers 5 writes it for each of these layers; None if it does not."""
    by_layer = numbers.decoder.settings.get("per_layer_config")
    first: Any = next(iter(by_layer.values()), {}) if isinstance(by_layer, Mapping) else {}
    return CONFIG_VALUES.whole(first, key) if isinstance(first, Mapping) and first.get(key) is not None else None


def _full_width(numbers: Numbers) -> int:
    if numbers.decoder.settings.get("per_layer_config") == {}:  # all layers are alike
        return numbers.decoder.width
    return _of_full_layers(numbers, "head_dim") or numbers.whole("global_head_dim", default=512)


def _kv_heads(numbers: Numbers) -> tuple[int, ...]:
    """Return the heads of keys and values in each layer. Older files have another number only if values are keys."""
    own = numbers.decoder.kv_heads
    older = numbers.whole("num_global_key_value_heads", default=own) if numbers.flag("attention_k_eq_v") else own
    full = _of_full_layers(numbers, "num_key_value_heads") or older
    return tuple(own if each == LOCAL else full for each in numbers.kinds)


def _inner(numbers: Numbers) -> int | tuple[int, ...]:
    """Return the width of the feed-forward network, which is doubled in layers that share keys and values."""
    if not numbers.flag("use_double_wide_mlp"):
        return numbers.decoder.inner
    own = numbers.decoder.layers - numbers.count("num_kv_shared_layers")
    return tuple(numbers.decoder.inner * (1 if layer < own else 2) for layer in range(numbers.decoder.layers))


def _factors(numbers: Numbers) -> Mapping[str, tuple[float, ...]]:
    """Return the divisors of the frequencies in layers with full attention."""
    pairs = _full_width(numbers) // 2
    turned = int(numbers.decoder.rotary.share * _full_width(numbers) // 2)
    return {"rope_freqs.weight": (1.0,) * turned + (_UNTURNED,) * (pairs - turned)}


_KEYS: Mapping[str, Key] = {
    "feed_forward_length": _inner,
    "attention.head_count_kv": _kv_heads,
    "attention.key_length": _full_width,
    "attention.value_length": _full_width,
    "attention.key_length_swa": lambda numbers: numbers.decoder.width,
    "attention.value_length_swa": lambda numbers: numbers.decoder.width,
    "attention.shared_kv_layers": lambda numbers: numbers.count("num_kv_shared_layers"),
    "attention.sliding_window_pattern": local_layers,
    "embedding_length_per_layer_input": lambda numbers: numbers.count("hidden_size_per_layer_input"),
    # Without the key llama.cpp takes 30.
    "final_logit_softcapping": lambda numbers: numbers.number("final_logit_softcapping", 0.0),
    "rope.dimension_count": _full_width,
    "rope.dimension_count_swa": lambda numbers: numbers.decoder.width,
    "rope.freq_base": lambda numbers: numbers.decoder.rotary.base,
    "rope.freq_base_swa": lambda numbers: numbers.decoder.rotary.local_base,
}
_UNADAPTED = ("per_layer_model_proj.weight", "per_layer_token_embd.weight")
_TENSORS: Mapping[str, tuple[Target, ...]] = {"layer_scalar": (Target("layer_output_scale.weight"),)}
_GEMMA_2: Assumed = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False,),
}
_ASSUMES: Assumed = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": ("vision",),
}


def _has_experts(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("enable_moe_block"))


def _vocabulary_rows(numbers: Numbers) -> tuple[Piece, ...]:
    """Return a row for each token: those of images and sound get the first one's, as in transformers."""
    own = numbers.whole("vocab_size_per_layer_input")
    lacking = numbers.decoder.vocabulary - own
    if lacking > MOST_PARTS:
        raise CONFIG_VALUES.invalid("vocab_size_per_layer_input", own, f"at most {MOST_PARTS} less than vocab_size")
    return (WHOLE, Piece(take=first_row(lacking))) if lacking > 0 else (WHOLE,)


def _sparsity(numbers: Numbers) -> tuple[float, ...]:
    """Return for each layer from how many standard deviations on values are kept; without limit where all are."""
    shares = numbers.numbers("activation_sparsity_pattern", numbers.decoder.layers)
    return tuple(NormalDist().inv_cdf(share) if share else -math.inf for share in shares)


_GEMMA_3N_KEYS: Mapping[str, Key] = {
    "attention.shared_kv_layers": lambda numbers: numbers.count("num_kv_shared_layers"),
    "attention.sliding_window_pattern": local_layers,
    "embedding_length_per_layer_input": lambda numbers: numbers.whole("hidden_size_per_layer_input"),
    "altup.active_idx": lambda numbers: numbers.count("altup_active_idx"),
    "altup.num_inputs": lambda numbers: numbers.whole("altup_num_inputs"),
    "activation_sparsity_scale": _sparsity,
    "rope.dimension_count": lambda numbers: numbers.decoder.width,
    "rope.freq_base": lambda numbers: numbers.decoder.rotary.base,
    "rope.freq_base_swa": lambda numbers: numbers.decoder.rotary.local_base,
}
_GEMMA_3N: Mapping[str, tuple[Target, ...]] = {
    "altup.correct_output_scale": (Target("altup_correct_scale.weight"),),
    "model.embed_tokens_per_layer.weight": (Target("per_layer_token_embd.weight", _vocabulary_rows),),
}

_GEMMA_4 = DecoderClass(
    "Gemma4ForCausalLM",
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
    },
    windowed=Windowed.ALWAYS,
    local=Local.PERIOD_AND_LAST,
    period=6,
    by_layer=True,
)

GEMMA: tuple[Architecture, ...] = (
    Architecture(
        "gemma",
        CLASSES["GemmaForCausalLM"],
        assumes={**GELU, **TIED, "attention_bias": (False,), "use_bidirectional_attention": (False,)},
    ),
    Architecture(
        "gemma2",
        CLASSES["Gemma2ForCausalLM"],
        assumes=_GEMMA_2,
        rope=("linear",),
        has_windows=True,
        refuses=other_windows,
    ),
    Architecture(
        "gemma3",
        CLASSES["Gemma3ForCausalLM"],
        assumes={**_GEMMA_2, "attn_logit_softcapping": (), "final_logit_softcapping": ()},
        rope=("linear",),
        has_windows=True,
        refuses=other_windows,
        wholes={"Gemma3ForConditionalGeneration": "gemma3_text"},
    ),
    Architecture(
        "gemma3n",
        DecoderClass(
            "Gemma3nForCausalLM",
            {
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": True,
                "sliding_window": 512,
                "rope_theta": 1_000_000.0,
                "final_logit_softcapping": 30.0,
                "vocab_size_per_layer_input": 262144,
                "hidden_size_per_layer_input": 256,
                "num_kv_shared_layers": 15,
                "altup_num_inputs": 4,
                "altup_active_idx": 0,
                "altup_correct_scale": True,
                "laurel_rank": 64,
            },
            windowed=Windowed.ALWAYS,
            local=Local.PERIOD,
            period=5,
        ),
        assumes={
            **_ASSUMES,
            "altup_num_inputs": (4,),
            "altup_active_idx": (0,),
            "altup_correct_scale": (True,),
            "laurel_rank": (64,),
            "hidden_size_per_layer_input": (256,),
        },
        rope=(),
        has_windows=True,
        tensors=_GEMMA_3N,
        stacks={
            "model.altup_projections.": "altup_proj.weight",
            "model.altup_unembed_projections.": "altup_unembd_proj.weight",
        },
        everywhere=("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"),
        keys=_GEMMA_3N_KEYS,
        unadapted=(*_UNADAPTED, ".altup_router.weight"),
        refuses=other_gemma_3n,
        notes="several streams of states, sparse layers, shared keys and values, embeddings of each layer; as many layers of each kind as the released models have",
        wholes={"Gemma3nForConditionalGeneration": "gemma3n_text"},
    ),
    Architecture(
        "gemma4",
        _GEMMA_4,
        when=_has_experts,
        assumes=_ASSUMES,
        rope=(),
        has_windows=True,
        experts=EXPERTS,
        tensors={
            **_TENSORS,
            "router.scale": (Target("ffn_gate_inp.scale"),),
            "router.per_expert_scale": (Target("ffn_down_exps.scale"),),
            "experts.gate_up_proj": (Target("ffn_gate_up_exps.weight"),),
            "experts.down_proj": (Target("ffn_down_exps.weight"),),
        },
        keys={**_KEYS, "expert_used_count": lambda numbers: numbers.whole("top_k_experts")},
        factors=_factors,
        unadapted=_UNADAPTED,
        refuses=other_gemma_4,
        notes="heads of two widths",
    ),
    Architecture(
        "gemma4",
        _GEMMA_4,
        assumes=_ASSUMES,
        rope=(),
        has_windows=True,
        tensors=_TENSORS,
        keys=_KEYS,
        factors=_factors,
        unadapted=_UNADAPTED,
        refuses=other_gemma_4,
        notes="heads of two widths, shared keys and values, embeddings of each layer",
        wholes={"Gemma4ForConditionalGeneration": "gemma4_text"},
    ),
)
