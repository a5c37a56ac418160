"""The image encoder of InternVL, as transformers stores it. Data, and light.

Sources: llama.cpp's ``conversion/internvl.py`` and ``tools/mtmd/models/internvl.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway_gguf.architectures.entry import CONFIG_VALUES, Piece
from slipway_gguf.vision.entry import Encoder, Place, Rows, Seen, describe_other, expand, linear

_LAYER = "vision_tower.encoder.layer.{}"
_LAYERS: Mapping[str, Mapping[str, Place]] = {
    "vision_tower.embeddings.patch_embeddings.projection": linear("v.patch_embd"),
    f"{_LAYER}.layernorm_before": linear("v.blk.{}.ln1"),
    f"{_LAYER}.layernorm_after": linear("v.blk.{}.ln2"),
    f"{_LAYER}.attention.q_proj": linear("v.blk.{}.attn_q", ends=("weight",)),
    f"{_LAYER}.attention.k_proj": linear("v.blk.{}.attn_k", ends=("weight",)),
    f"{_LAYER}.attention.v_proj": linear("v.blk.{}.attn_v", ends=("weight",)),
    f"{_LAYER}.attention.projection_layer": linear("v.blk.{}.attn_out"),
    f"{_LAYER}.mlp.fc1": linear("v.blk.{}.ffn_up"),
    f"{_LAYER}.mlp.fc2": linear("v.blk.{}.ffn_down"),
    "multi_modal_projector.layer_norm": linear("mm.model.mlp.0"),
    "multi_modal_projector.linear_1": linear("mm.model.mlp.1"),
    "multi_modal_projector.linear_2": linear("mm.model.mlp.3"),
}
_BIASES: Mapping[str, Mapping[str, Place]] = {
    f"{_LAYER}.attention.{part}_proj": linear(f"v.blk.{{}}.attn_{part}", ends=("bias",)) for part in "qkv"
}


def _flat(_: Seen) -> Piece:
    """Return the piece for a vector with axes of size 1."""
    return Piece(form=lambda whole: whole.reshape(-1))


def _class_last(_: Seen) -> Piece:
    """Return the piece for learned positions: llama.cpp has the token for the whole image behind the patches, and the model before them.

    llama.cpp's converter keeps the order, so that in its files each patch has its neighbour's position. This is a copy.
    (1, 1 + patches, width) → (patches + 1, width)
    """
    return Piece(form=lambda whole: whole[0][[*range(1, whole.shape[1]), 0]])


def _side(seen: Seen, key: str) -> int:
    """Return the side of a square, which older files have as a number and newer ones as two."""
    value = seen.vision[key]
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return CONFIG_VALUES.whole({key: value}, key)


def _merged(seen: Seen) -> int:
    """Return the side of the square of patches that become one token."""
    ratio = CONFIG_VALUES.positive(seen.config, "downsample_ratio", 0.5)
    if not 1 / _side(seen, "image_size") <= ratio <= 1:
        raise CONFIG_VALUES.invalid("downsample_ratio", ratio, "a share of a side of an image")
    return round(1 / ratio)


def _refuse(seen: Seen) -> str:
    """Refuse features of another layer than the last one, and those that keep the token for the whole image."""
    wanted = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu"}
    for key, value in wanted.items():
        if seen.config.get(key, value) != value:
            return describe_other(key, seen.config.get(key), str(value))
    return ""


_ASSUMES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu",),
    "num_channels": (3,),
    "norm_type": ("layer_norm",),
    "use_qk_norm": (False,),
    "use_absolute_position_embeddings": (True,),
    "use_mean_pooling": (True,),
}

INTERN: tuple[Encoder, ...] = (
    Encoder(
        projector="internvl",
        classes=("InternVLForConditionalGeneration",),
        kind=("internvl_vision",),
        defaults={
            **{key: values[0] for key, values in _ASSUMES.items()},
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": (448, 448),
            "patch_size": (14, 14),
            "layer_norm_eps": 1e-6,
        },
        assumes=_ASSUMES,
        keys={
            "use_gelu": lambda _: True,
            "vision.image_size": lambda seen: _side(seen, "image_size"),
            "vision.patch_size": lambda seen: _side(seen, "patch_size"),
            "vision.attention.layer_norm_epsilon": lambda seen: seen.number("layer_norm_eps"),
            "vision.projector.scale_factor": _merged,
        },
        tensors={
            **expand(_LAYERS),
            **expand(_BIASES, optional=True),
            "vision_tower.embeddings.cls_token": Rows((Place("v.class_embd", _flat),)),
            "vision_tower.embeddings.position_embeddings": Rows((Place("v.position_embd.weight", _class_last),)),
            f"{_LAYER}.lambda_1": Rows((Place("v.blk.{}.ls1.weight"),)),
            f"{_LAYER}.lambda_2": Rows((Place("v.blk.{}.ls2.weight"),)),
        },
        unused=("vision_tower.embeddings.mask_token",),
        refuses=_refuse,
    ),
)
