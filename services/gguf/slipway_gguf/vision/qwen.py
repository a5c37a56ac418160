"""Image encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5. Data, and light.

Sources: llama.cpp's ``conversion/qwenvl.py``, ``conversion/qwen3vl.py``, ``tools/mtmd/models/qwen2vl.cpp`` and ``qwen3vl.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from slipway_gguf.architectures.entry import Piece
from slipway_gguf.architectures.views import rows
from slipway_gguf.vision.entry import (
    CLIP_MEAN,
    CLIP_STD,
    Encoder,
    Place,
    Rows,
    Seen,
    describe_other,
    expand,
    linear,
    other_base,
)

_WINDOW = 112
"""Side of a window of attention in pixels, which llama.cpp has no key for."""
_EPSILON = 1e-6
"""Epsilon of all norms, which is no setting in transformers either."""
_PRETRAINED_SIZE = 560
"""llama.cpp wants the side of an image; the encoder takes any, and has no learned positions that it would be the number of."""


def _frame(index: int) -> Callable[[Any], Any]:
    """Return a view of the part of a convolution for one of two frames. (out, in, 2, height, width) → (out, in, height, width)."""

    def view(whole: Any) -> Any:
        if whole.ndim != 5 or whole.shape[2] != 2:
            raise ValueError("it is no convolution over two frames")
        return whole[:, :, index]

    return view


def _of_frame(index: int) -> Callable[[Seen], Piece]:
    piece = Piece(form=_frame(index))
    return lambda _: piece


_PATCHES = Rows((Place("v.patch_embd.weight", _of_frame(0)), Place("v.patch_embd.weight.1", _of_frame(1))))


def _third(index: int) -> Callable[[Seen], Piece]:
    """Return a function for the rows of queries, keys or values."""

    def piece(seen: Seen) -> Piece:
        width = seen.whole("embed_dim", "hidden_size")
        return Piece(take=rows(index * width, (index + 1) * width))

    return piece


_THIRDS = {
    f"visual.blocks.{{}}.attn.qkv.{end}": Rows(
        tuple(Place(f"v.blk.{{}}.attn_{part}.{end}", _third(index)) for index, part in enumerate("qkv"))
    )
    for end in ("weight", "bias")
}
_RMS = ("weight",)


def _side(seen: Seen) -> int:
    """Return the side of the square image with as many patches as there are learned positions."""
    return math.isqrt(seen.whole("num_position_embeddings")) * seen.whole("patch_size")


def _other_positions(seen: Seen) -> str:
    count = seen.whole("num_position_embeddings")
    if math.isqrt(count) ** 2 != count:
        return describe_other("num_position_embeddings", count, "the square of a whole number")
    return other_base(seen)


def _deepstack(seen: Seen) -> tuple[bool, ...]:
    return tuple(layer in seen.listed("deepstack_visual_indexes") for layer in range(seen.layers))


def _period(seen: Seen) -> int:
    """Return every which layer attends to the whole image."""
    return seen.listed("fullatt_block_indexes")[0] + 1


def _other_windows(seen: Seen) -> str:
    """Refuse another pattern of layers with windows than one layer without in each period."""
    whole = seen.listed("fullatt_block_indexes")
    period = whole[0] + 1 if whole else 0
    if not whole or whole != tuple(range(period - 1, seen.layers, period)):
        return describe_other("fullatt_block_indexes", list(whole), "one layer in each period that attends to all")
    return other_base(seen)


_QWEN3_MODULES: Mapping[str, Mapping[str, Place]] = {
    "visual.blocks.{}.norm1": linear("v.blk.{}.ln1"),
    "visual.blocks.{}.norm2": linear("v.blk.{}.ln2"),
    "visual.blocks.{}.attn.qkv": linear("v.blk.{}.attn_qkv"),
    "visual.blocks.{}.attn.proj": linear("v.blk.{}.attn_out"),
    "visual.blocks.{}.mlp.linear_fc1": linear("v.blk.{}.ffn_up"),
    "visual.blocks.{}.mlp.linear_fc2": linear("v.blk.{}.ffn_down"),
    "visual.merger.norm": linear("v.post_ln"),
    "visual.merger.linear_fc1": linear("mm.0"),
    "visual.merger.linear_fc2": linear("mm.2"),
    "visual.pos_embed": linear("v.position_embd", ends=("weight",)),
}
_DEEPSTACK_MODULES: Mapping[str, Mapping[str, Place]] = {
    "visual.deepstack_merger_list.{}.norm": linear("v.deepstack.{}.norm"),
    "visual.deepstack_merger_list.{}.linear_fc1": linear("v.deepstack.{}.fc1"),
    "visual.deepstack_merger_list.{}.linear_fc2": linear("v.deepstack.{}.fc2"),
}
_QWEN2_MODULES: Mapping[str, Mapping[str, Place]] = {
    "visual.blocks.{}.norm1": linear("v.blk.{}.ln1"),
    "visual.blocks.{}.norm2": linear("v.blk.{}.ln2"),
    "visual.blocks.{}.attn.proj": linear("v.blk.{}.attn_out"),
    "visual.blocks.{}.mlp.fc1": linear("v.blk.{}.ffn_up"),
    "visual.blocks.{}.mlp.fc2": linear("v.blk.{}.ffn_down"),
    "visual.merger.ln_q": linear("v.post_ln"),
    "visual.merger.mlp.0": linear("mm.0"),
    "visual.merger.mlp.2": linear("mm.2"),
}
_QWEN25_MODULES: Mapping[str, Mapping[str, Place]] = {
    "visual.blocks.{}.norm1": linear("v.blk.{}.ln1", ends=_RMS),
    "visual.blocks.{}.norm2": linear("v.blk.{}.ln2", ends=_RMS),
    "visual.blocks.{}.attn.proj": linear("v.blk.{}.attn_out"),
    "visual.blocks.{}.mlp.gate_proj": linear("v.blk.{}.ffn_gate"),
    "visual.blocks.{}.mlp.up_proj": linear("v.blk.{}.ffn_up"),
    "visual.blocks.{}.mlp.down_proj": linear("v.blk.{}.ffn_down"),
    "visual.merger.ln_q": linear("v.post_ln", ends=_RMS),
    "visual.merger.mlp.0": linear("mm.0"),
    "visual.merger.mlp.2": linear("mm.2"),
}

_QWEN3_DEFAULTS: Mapping[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}
_FRAMES: Mapping[str, tuple[Any, ...]] = {"temporal_patch_size": (2,), "spatial_merge_size": (2,)}

_QWEN3 = Encoder(
    projector="qwen3vl_merger",
    classes=("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    kind=("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision"),
    defaults={**_QWEN3_DEFAULTS, "deepstack_visual_indexes": (8, 16, 24)},
    assumes={**_FRAMES, "hidden_act": ("gelu_pytorch_tanh",), "in_channels": (3,)},
    keys={
        "use_gelu": lambda _: True,
        "vision.image_size": _side,
        "vision.spatial_merge_size": lambda seen: seen.whole("spatial_merge_size"),
        "vision.attention.layer_norm_epsilon": lambda _: _EPSILON,
        "vision.is_deepstack_layers": _deepstack,
    },
    tensors={
        "visual.patch_embed.proj.weight": _PATCHES,
        "visual.patch_embed.proj.bias": Rows((Place("v.patch_embd.bias"),)),
        **expand(_QWEN3_MODULES),
        **expand(_DEEPSTACK_MODULES, layers=lambda seen: seen.listed("deepstack_visual_indexes")),
    },
    # The image processor's class is Qwen2-VL's; the released models' settings name halves.
    mean=CLIP_MEAN,
    deviation=CLIP_STD,
    refuses=_other_positions,
)
QWEN: tuple[Encoder, ...] = (
    _QWEN3,
    replace(
        _QWEN3,
        classes=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        kind=("qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision"),
        defaults=_QWEN3_DEFAULTS,
    ),
    Encoder(
        projector="qwen2.5vl_merger",
        classes=("Qwen2_5_VLForConditionalGeneration",),
        kind=("qwen2_5_vl", "qwen2_5_vl_vision"),
        defaults={
            "depth": 32,
            "hidden_size": 3584,
            "hidden_act": "silu",
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        assumes={**_FRAMES, "hidden_act": ("silu",), "in_channels": (3,), "window_size": (_WINDOW,)},
        keys={
            "use_silu": lambda _: True,
            "vision.image_size": lambda _: _PRETRAINED_SIZE,
            "vision.spatial_merge_size": lambda seen: seen.whole("spatial_merge_size"),
            "vision.n_wa_pattern": _period,
            "vision.attention.layer_norm_epsilon": lambda _: _EPSILON,
        },
        tensors={"visual.patch_embed.proj.weight": _PATCHES, **_THIRDS, **expand(_QWEN25_MODULES)},
        mean=CLIP_MEAN,
        deviation=CLIP_STD,
        refuses=_other_windows,
    ),
    Encoder(
        projector="qwen2vl_merger",
        classes=("Qwen2VLForConditionalGeneration",),
        kind=("qwen2_vl", "qwen2_vl_vision"),
        defaults={
            "depth": 32,
            "embed_dim": 1280,
            "hidden_act": "quick_gelu",
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        assumes={**_FRAMES, "hidden_act": ("quick_gelu",), "in_channels": (3,)},
        keys={
            "vision.embedding_length": lambda seen: seen.whole("embed_dim"),
            "vision.feed_forward_length": lambda seen: seen.whole("embed_dim") * seen.whole("mlp_ratio"),
            "vision.image_size": lambda _: _PRETRAINED_SIZE,
            "vision.spatial_merge_size": lambda seen: seen.whole("spatial_merge_size"),
            "vision.attention.layer_norm_epsilon": lambda _: _EPSILON,
        },
        tensors={"visual.patch_embed.proj.weight": _PATCHES, **_THIRDS, **expand(_QWEN2_MODULES)},
        mean=CLIP_MEAN,
        deviation=CLIP_STD,
        refuses=other_base,
    ),
)
