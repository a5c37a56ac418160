"""Parameters of the adapter stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.stage import StageParams

Target = Literal["peft", "onnx", "gguf"]
FactorType = Literal["auto", "float32", "bfloat16", "float16"]


class AdapterParams(StageParams):
    """Parameters of the adapter stage."""

    target: Target = Field(
        default="peft",
        description="peft writes a folder for peft, vLLM, SGLang and KServe; onnx the base's graph with the factors as inputs; gguf a folder of "
        "what llama.cpp takes, for the stage gguf_adapter",
    )
    dtype: FactorType = Field(
        default="auto",
        description="type of the factors of a peft folder; auto keeps the stored one, or takes float32 where a scaling would round it",
    )
