"""The image encoder of Gemma 4. Data, and light.

Sources: llama.cpp's ``conversion/gemma.py`` and ``tools/mtmd/models/gemma4v.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipway_gguf.vision.entry import Encoder, Place, Rows, Seen, describe_other, expand, linear, other_base, unfolded

_LAYER = "vision_tower.encoder.layers.{}"
_WEIGHT = ("weight",)
_LINEAR: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS: Mapping[str, str] = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_LIMITS = ("input_min", "input_max", "output_min", "output_max")
"""Limits of the inputs and results of a linear layer, in models that have them."""
_BASE = 100.0


def _refuse(seen: Seen) -> str:
    """Refuse heads of another width than their share of the states, and fewer heads of keys than of queries."""
    width, heads = seen.whole("head_dim"), seen.heads
    if width * heads != seen.whole("hidden_size"):
        return describe_other("head_dim", width, f"the hidden size divided by {heads} heads")
    if seen.whole("num_key_value_heads") != heads:
        return describe_other("num_key_value_heads", seen.vision["num_key_value_heads"], str(heads))
    return other_base(seen, base=_BASE)


def _sees_later_tokens(seen: Seen) -> str:
    """Say so if tokens of an image do not see later ones of it in the model."""
    if seen.config.text.get("use_bidirectional_attention") == "vision":
        return ""
    return "llama.cpp lets the tokens of an image see later tokens of it, and the model does not (use_bidirectional_attention)"


GEMMA_4: tuple[Encoder, ...] = (
    Encoder(
        projector="gemma4v",
        classes=("Gemma4ForConditionalGeneration",),
        kind=("gemma4_vision",),
        defaults={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 16,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "head_dim": 64,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "pooling_kernel_size": 3,
            "patch_size": 16,
            "attention_bias": False,
        },
        assumes={"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,)},
        keys={
            "use_gelu": lambda _: True,
            # llama.cpp wants the side of an image, and does not use it.
            "vision.image_size": lambda seen: 14 * seen.whole("patch_size"),
            "vision.attention.layer_norm_epsilon": lambda seen: seen.number("rms_norm_eps"),
            "vision.projector.scale_factor": lambda seen: seen.whole("pooling_kernel_size"),
        },
        tensors={
            "vision_tower.patch_embedder.input_proj.weight": Rows((Place("v.patch_embd.weight", unfolded),)),
            "vision_tower.patch_embedder.position_embedding_table": Rows((Place("v.position_embd.weight"),)),
            "embed_vision.embedding_projection.weight": Rows((Place("mm.input_projection.weight"),)),
            **expand({f"{_LAYER}.{name}": linear(f"v.blk.{{}}.{own}", ends=_WEIGHT) for name, own in _NORMS.items()}),
            **expand(
                {f"{_LAYER}.{name}.linear": linear(f"v.blk.{{}}.{own}", ends=_WEIGHT) for name, own in _LINEAR.items()}
            ),
            **expand(
                {f"{_LAYER}.{name}": linear(f"v.blk.{{}}.{own}", ends=_LIMITS) for name, own in _LINEAR.items()},
                optional=True,
            ),
            "vision_tower.std_bias": Rows((Place("v.std_bias"),), optional=True),
            "vision_tower.std_scale": Rows((Place("v.std_scale"),), optional=True),
        },
        mean=(0.0, 0.0, 0.0),
        deviation=(1.0, 1.0, 1.0),
        others=("audio_tower.", "embed_audio."),
        refuses=_refuse,
        differs=_sees_later_tokens,
    ),
)
