"""The image encoder of Mistral Small 3.1 and later, which is Pixtral's. Data, and light.

Sources: llama.cpp's ``conversion/llava.py`` and ``tools/mtmd/models/pixtral.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipway_gguf.architectures.entry import CONFIG_VALUES, Piece
from slipway_gguf.architectures.views import paired_rows
from slipway_gguf.vision.entry import (
    CLIP_MEAN,
    CLIP_STD,
    Encoder,
    Place,
    Seen,
    describe_other,
    expand,
    linear,
    other_base,
)

_EPSILON = 1e-5
"""Epsilon of the encoder's norms, which is no setting in transformers; llama.cpp takes it for the projection's norm too."""
_BREAK = "[IMG_BREAK]"
"""The token behind each row of an image; llama.cpp puts its embedding there itself."""
_MERGE = 2
_WEIGHT = ("weight",)


def _in_pairs(seen: Seen) -> Piece:
    """Return the piece for queries and keys: llama.cpp turns neighbouring values."""
    return Piece(rows=paired_rows(seen.heads))


def _row_of_break(seen: Seen) -> Piece:
    token = seen.tokens[_BREAK]
    return Piece(form=lambda whole: whole[token])


def _refuse(seen: Seen) -> str:
    """Refuse a tokenizer without the token behind rows, another layer than the last one, and another epsilon or base."""
    if _BREAK not in seen.tokens:
        return f"the tokenizer has no token {_BREAK}, which llama.cpp puts behind each row of an image"
    config = seen.config
    wanted = {"vision_feature_layer": (-1, [-1]), "projector_hidden_act": ("gelu",)}
    for key, values in wanted.items():
        if config.get(key, values[0]) not in values:
            return describe_other(key, config.get(key), str(values[0]))
    epsilon = CONFIG_VALUES.number(config.text, "rms_norm_eps", _EPSILON)
    return other_base(seen) or (
        "" if epsilon == _EPSILON else describe_other("rms_norm_eps", epsilon, f"{_EPSILON} for the projection's norm")
    )


_LAYERS: Mapping[str, Mapping[str, Place]] = {
    "vision_tower.patch_conv": linear("v.patch_embd", ends=_WEIGHT),
    "vision_tower.ln_pre": linear("v.pre_ln", ends=_WEIGHT),
    "vision_tower.transformer.layers.{}.attention_norm": linear("v.blk.{}.ln1", ends=_WEIGHT),
    "vision_tower.transformer.layers.{}.ffn_norm": linear("v.blk.{}.ln2", ends=_WEIGHT),
    "vision_tower.transformer.layers.{}.attention.q_proj": linear("v.blk.{}.attn_q", piece=_in_pairs, ends=_WEIGHT),
    "vision_tower.transformer.layers.{}.attention.k_proj": linear("v.blk.{}.attn_k", piece=_in_pairs, ends=_WEIGHT),
    "vision_tower.transformer.layers.{}.attention.v_proj": linear("v.blk.{}.attn_v", ends=_WEIGHT),
    "vision_tower.transformer.layers.{}.attention.o_proj": linear("v.blk.{}.attn_out", ends=_WEIGHT),
    "vision_tower.transformer.layers.{}.feed_forward.gate_proj": linear("v.blk.{}.ffn_gate", ends=_WEIGHT),
    "vision_tower.transformer.layers.{}.feed_forward.up_proj": linear("v.blk.{}.ffn_up", ends=_WEIGHT),
    "vision_tower.transformer.layers.{}.feed_forward.down_proj": linear("v.blk.{}.ffn_down", ends=_WEIGHT),
    "multi_modal_projector.norm": linear("mm.input_norm", ends=_WEIGHT),
    "multi_modal_projector.patch_merger.merging_layer": linear("mm.patch_merger", ends=_WEIGHT),
    "multi_modal_projector.linear_1": linear("mm.1", ends=_WEIGHT),
    "multi_modal_projector.linear_2": linear("mm.2", ends=_WEIGHT),
}
_BIASES: Mapping[str, Mapping[str, Place]] = {
    "multi_modal_projector.linear_1": linear("mm.1", ends=("bias",)),
    "multi_modal_projector.linear_2": linear("mm.2", ends=("bias",)),
}

PIXTRAL: tuple[Encoder, ...] = (
    Encoder(
        projector="pixtral",
        classes=("Mistral3ForConditionalGeneration",),
        kind=("pixtral",),
        defaults={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_channels": 3,
            "image_size": 1024,
            "patch_size": 16,
            "hidden_act": "gelu",
        },
        assumes={"hidden_act": ("silu", "gelu"), "num_channels": (3,)},
        keys={
            "use_silu": lambda seen: seen.vision["hidden_act"] == "silu",
            "use_gelu": lambda seen: seen.vision["hidden_act"] == "gelu",
            "vision.image_size": lambda seen: seen.whole("image_size"),
            "vision.spatial_merge_size": lambda seen: CONFIG_VALUES.whole(
                seen.config, "spatial_merge_size", default=_MERGE
            ),
            "vision.attention.layer_norm_epsilon": lambda _: _EPSILON,
        },
        tensors={**expand(_LAYERS), **expand(_BIASES, optional=True)},
        borrowed={"model.embed_tokens.weight": Place("v.token_embd.img_break", _row_of_break)},
        mean=CLIP_MEAN,
        deviation=CLIP_STD,
        refuses=_refuse,
    ),
)
