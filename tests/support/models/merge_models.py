"""Tiny models of many architectures, with random weights made from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

from support.models.merge_cases import SMALL, TOKENS, VOCAB, make_model

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_PAIR = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
_WAV2VEC2 = {
    "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
_IMAGES = {"image_size": 16, "patch_size": 8}
_VIDEO = {**_IMAGES, "num_frames": 4, "tubelet_size": 2, "num_labels": 3}
_WHISPER = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "bos_token_id": 1}

FAMILIES: dict[str, Callable[[], Any]] = {
    "bart without a head": lambda: tf.BartModel(tf.BartConfig(**_PAIR, max_position_embeddings=32)),
    "bert": lambda: tf.BertForSequenceClassification(tf.BertConfig(**_SMALL)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**SMALL, head_dim=8)),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**_PAIR, max_position_embeddings=32)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SMALL, num_local_experts=4)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SMALL)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**SMALL, pad_token_id=0)),
    "qwen3-moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**SMALL, **_EXPERTS)),
    "resnet": lambda: tf.ResNetForImageClassification(tf.ResNetConfig(**_RESNET)),
    "clip": lambda: tf.CLIPModel(tf.CLIPConfig(text_config=_SMALL, vision_config=_SMALL | _IMAGES)),
    "t5 without a head": lambda: tf.T5Model(tf.T5Config(**_T5, decoder_start_token_id=0)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**_T5, decoder_start_token_id=0)),
    "videomae": lambda: tf.VideoMAEForVideoClassification(tf.VideoMAEConfig(**_SMALL, **_VIDEO)),
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**_SMALL | _IMAGES)),
    "wav2vec2": lambda: tf.Wav2Vec2ForCTC(tf.Wav2Vec2Config(**_SMALL, **_WAV2VEC2)),
    "whisper": lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(**_PAIR, **_WHISPER)),
}


def make_family(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Make a model of one of :data:`FAMILIES`, or of ``merge_cases.CONFIGS``."""
    if kind not in FAMILIES:
        return make_model(kind, dtype)
    torch.manual_seed(7)
    model = FAMILIES[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype)


def outputs(model: Any, kind: str) -> torch.Tensor:
    """Return the logits of a model on fixed inputs of its kind."""
    if kind in ("mixtral", "qwen3-moe"):
        model = model.float()  # its grouped products do not support double
    generator = torch.Generator().manual_seed(3)
    dtype = next(model.parameters()).dtype
    inputs: dict[str, torch.Tensor] = {"input_ids": TOKENS}
    if kind in ("resnet", "vit"):
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator).to(dtype)}
    elif kind == "videomae":
        inputs = {"pixel_values": torch.randn(2, 4, 3, 16, 16, generator=generator).to(dtype)}
    elif kind == "wav2vec2":
        inputs = {"input_values": torch.randn(2, 400, generator=generator).to(dtype)}
    elif kind == "whisper":
        inputs = {"input_features": torch.randn(2, 8, 32, generator=generator).to(dtype), "decoder_input_ids": TOKENS}
    elif kind in ("t5", "marian"):
        inputs["decoder_input_ids"] = TOKENS
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**inputs).logits
    return logits.double()
