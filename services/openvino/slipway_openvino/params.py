"""Parameters of the openvino stage, the families that become an IR, and the names of its files.

Written models have the names that OpenVINO's own tools know.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.model.configuration import ModelConfig
from slipway.model.families import (
    DECODER,
    ENCODER_DECODER,
    FEATURE_EXTRACTION,
    MASKED_LANGUAGE_MODEL,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFIER,
    SPEECH,
    TOKEN_CLASSIFIER,
)
from slipway.stage import StageParams

Level = Literal["", "fp16", "int8", "int4"]

PAIRS = (ENCODER_DECODER, SPEECH)
"""Families that become two models: an encoder and a decoder."""
FAMILIES = (
    DECODER,
    *PAIRS,
    SEQUENCE_CLASSIFIER,
    TOKEN_CLASSIFIER,
    QUESTION_ANSWERING,
    MASKED_LANGUAGE_MODEL,
    FEATURE_EXTRACTION,
)

GRAPH, ENCODER_GRAPH, DECODER_GRAPH = "model.onnx", "encoder_model.onnx", "decoder_model.onnx"
MODEL = "openvino_model.xml"
ENCODER_MODEL, DECODER_MODEL = "openvino_encoder_model.xml", "openvino_decoder_model.xml"


class OpenVinoParams(StageParams):
    """Parameters of the openvino stage."""

    level: Level = Field(
        default="",
        description="fp16 stores weights in half precision; int8 and int4 say that the graph's weights are integers already",
    )
    tokenizer: bool = Field(default=True, description="also convert the tokenizer, for openvino-genai")


_MIXTURES = (
    *("deepseek_v3", "gemma4_text", "glm4_moe", "gpt_oss", "granitemoe", "llama4_text"),
    *("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
)
"""Types of mixtures whose graphs were compared with PyTorch."""


def refusal_reason(config: ModelConfig) -> str:
    """Return why a model does not become an IR; empty if it does."""
    if config.family in FAMILIES and config.keeps_states:
        return f"the model is {config.description} with layers that keep a state, which no IR is made of"
    if config.family in FAMILIES and config.mixes_experts and config.text.get("model_type") not in _MIXTURES:
        return f"the model is {config.description} with a mixture of experts that was not compared in OpenVINO"
    if config.family in FAMILIES:
        return ""
    known = ", ".join(family.name for family in FAMILIES)
    return f"the model is not one of the families that become an IR ({known}), but {config.description}"
