"""Parameters of the tensorrt_llm stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.stage import StageParams

Dtype = Literal["auto", "float16", "bfloat16", "float32"]
MOST_PARTS = 64
"""Largest number of GPUs that share a layer, and of groups of layers."""


class TensorRTLLMParams(StageParams):
    """Parameters of the tensorrt_llm stage."""

    dtype: Dtype = Field(default="auto", description="type of all weights; auto is the model's own")
    tp: int = Field(default=1, ge=1, le=MOST_PARTS, description="GPUs that share each layer (tensor parallelism)")
    pp: int = Field(default=1, ge=1, le=MOST_PARTS, description="groups of layers, each on its own GPUs (pipelining)")
