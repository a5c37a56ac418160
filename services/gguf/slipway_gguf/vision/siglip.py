"""The image encoders that are SigLIP's: Gemma 3, SmolVLM, Idefics 3 and LFM2-VL. Data, and light.

Sources: llama.cpp's ``conversion/gemma.py``, ``conversion/smolvlm.py``, ``conversion/lfm2.py`` and ``tools/mtmd/models/siglip.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slipway_gguf.architectures.entry import CONFIG_VALUES
from slipway_gguf.vision.entry import (
    Encoder,
    Key,
    Pieces,
    Place,
    Rows,
    Seen,
    as_stored,
    describe_other,
    expand,
    linear,
    unfolded,
)

_LAYERS: Mapping[str, Mapping[str, Place]] = {
    "embeddings.position_embedding": linear("v.position_embd", ends=("weight",)),
    "post_layernorm": linear("v.post_ln"),
    "encoder.layers.{}.layer_norm1": linear("v.blk.{}.ln1"),
    "encoder.layers.{}.layer_norm2": linear("v.blk.{}.ln2"),
    "encoder.layers.{}.mlp.fc1": linear("v.blk.{}.ffn_up"),
    "encoder.layers.{}.mlp.fc2": linear("v.blk.{}.ffn_down"),
    "encoder.layers.{}.self_attn.q_proj": linear("v.blk.{}.attn_q"),
    "encoder.layers.{}.self_attn.k_proj": linear("v.blk.{}.attn_k"),
    "encoder.layers.{}.self_attn.v_proj": linear("v.blk.{}.attn_v"),
    "encoder.layers.{}.self_attn.out_proj": linear("v.blk.{}.attn_out"),
}
_PATCHES = "embeddings.patch_embedding"
_DEFAULTS: Mapping[str, Any] = {
    "num_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_ASSUMES: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("gelu_pytorch_tanh",), "num_channels": (3,)}
_KEYS: Mapping[str, Key] = {
    "use_gelu": lambda _: True,
    "vision.image_size": lambda seen: seen.whole("image_size"),
    "vision.attention.layer_norm_epsilon": lambda seen: seen.number("layer_norm_eps"),
}


def _siglip(prefix: str, *, patches: Pieces = as_stored) -> dict[str, Rows]:
    """Return the places of the encoder's tensors, whose names begin with ``prefix``."""
    modules = {
        **_LAYERS,
        _PATCHES: {**linear("v.patch_embd"), **linear("v.patch_embd", piece=patches, ends=("weight",))},
    }
    return expand({f"{prefix}.{name}": places for name, places in modules.items()})


def _longest_edge(seen: Seen) -> int:
    """Return the length of an image's longer side after the first resizing."""
    size = seen.processor.get("size")
    longest = size.get("longest_edge") if isinstance(size, Mapping) else None
    return longest if isinstance(longest, int) and longest > 0 else seen.whole("image_size")


def _other_last_layer(seen: Seen) -> str:
    """Refuse features of another layer than the last one, and another activation between the projections."""
    for key, values in (("vision_feature_layer", (-1, None)), ("projector_hidden_act", ("gelu", None))):
        if seen.config.get(key) not in values:
            return describe_other(key, seen.config.get(key), str(values[0]))
    return ""


def _tokens_per_side(seen: Seen) -> int:
    return math.isqrt(CONFIG_VALUES.whole(seen.config, "mm_tokens_per_image", default=256))


def _pooled(seen: Seen) -> int:
    """Return the side of the square of patches that become one token."""
    return seen.whole("image_size") // seen.whole("patch_size") // _tokens_per_side(seen)


def _other_pooling(seen: Seen) -> str:
    patches, tokens = seen.whole("image_size") // seen.whole("patch_size"), _tokens_per_side(seen)
    if patches % tokens or tokens**2 != CONFIG_VALUES.whole(seen.config, "mm_tokens_per_image", default=256):
        count = seen.config.get("mm_tokens_per_image")
        return describe_other("mm_tokens_per_image", count, f"squares that divide {patches} patches a side")
    return ""


SIGLIP: tuple[Encoder, ...] = (
    Encoder(
        projector="gemma3",
        classes=("Gemma3ForConditionalGeneration",),
        kind=("siglip_vision_model",),
        defaults={
            **_DEFAULTS,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 224,
            "patch_size": 16,
        },
        assumes=_ASSUMES,
        keys={**_KEYS, "vision.projector.scale_factor": _pooled},
        tensors={
            **_siglip("vision_tower"),
            "multi_modal_projector.mm_input_projection_weight": Rows((Place("mm.input_projection.weight"),)),
            "multi_modal_projector.mm_soft_emb_norm.weight": Rows((Place("mm.soft_emb_norm.weight", offset=1.0),)),
        },
        # The head pools an image into one vector, which Gemma does not read.
        unused=("vision_tower.head.",),
        refuses=_other_pooling,
    ),
    *(
        Encoder(
            projector="idefics3",
            classes=(class_name,),
            kind=kind,
            defaults={
                **_DEFAULTS,
                "hidden_size": 1152,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 16,
                "image_size": 224,
                "patch_size": 32,
            },
            assumes=_ASSUMES,
            keys={
                **_KEYS,
                "vision.projector.scale_factor": lambda seen: CONFIG_VALUES.whole(
                    seen.config, "scale_factor", default=2
                ),
                "vision.preproc_image_size": _longest_edge,
            },
            tensors={
                **_siglip("vision_model"),
                "connector.modality_projection.proj.weight": Rows((Place("mm.model.fc.weight"),)),
            },
        )
        for class_name, kind in (
            ("SmolVLMForConditionalGeneration", ("smolvlm", "smolvlm_vision")),
            ("Idefics3ForConditionalGeneration", ("idefics3", "idefics3_vision")),
        )
    ),
    Encoder(
        projector="lfm2",
        classes=("Lfm2VlForConditionalGeneration",),
        kind=("siglip2_vision_model",),
        defaults={
            **_DEFAULTS,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_patches": 256,
            "patch_size": 16,
        },
        assumes=_ASSUMES,
        keys={
            **_KEYS,
            "vision.image_size": lambda seen: math.isqrt(seen.whole("num_patches")) * seen.whole("patch_size"),
            "vision.projector.scale_factor": lambda seen: CONFIG_VALUES.whole(
                seen.config, "downsample_factor", default=2
            ),
        },
        tensors={
            **_siglip("vision_tower", patches=unfolded),
            **expand({"multi_modal_projector.layer_norm": linear("mm.input_norm")}, optional=True),
            **expand({f"multi_modal_projector.linear_{number}": linear(f"mm.{number}") for number in (1, 2)}),
        },
        unused=("vision_tower.head.",),
        refuses=_other_last_layer,
    ),
)
