"""Parameters of the stages torchscript and torch_export, the names of their files, and the models that become no graph."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.model.configuration import ModelConfig
from slipway.stage import StageParams

LEVELS = {"fp16": "float16", "bf16": "bfloat16"}
"""Levels of both formats, and the type in which the graph stores and computes."""

PRODUCT = "PyTorch graph"
"""What the formats make, in messages."""

SCRIPT, PROGRAM, COMPILED = "model.pt", "model.pt2", "model.aoti.pt2"
DESCRIPTIONS = {SCRIPT: "torchscript.json", PROGRAM: "torch_export.json"}
"""File beside a graph that describes its inputs and outputs."""


class _GraphParams(StageParams):
    level: Literal["none", "fp16", "bf16"] = Field(
        default="none", description="type in which the graph stores weights and computes; none is float32"
    )
    attention: Literal["sdpa", "eager"] = Field(
        default="sdpa", description="transformers' attention: fused, or in single operators"
    )


class TorchScriptParams(_GraphParams):
    """Parameters of the torchscript stage."""

    control_flow: Literal["trace", "script", "prove"] = Field(
        default="trace",
        description="what happens where the code branches on values: trace refuses, script compiles the module that branches, "
        "prove keeps the trace if the comparison at other shapes shows no difference",
    )
    optimize: bool = Field(
        default=False, description="rewrite the frozen graph for inference on CPUs (torch.jit.optimize_for_inference)"
    )


class TorchExportParams(_GraphParams):
    """Parameters of the torch_export stage."""

    aot: bool = Field(default=False, description="also compile the program for this machine's CPU by AOTInductor")


def refusal_reason(config: ModelConfig) -> str:
    """Return why a model cannot become a graph; empty if it can."""
    why = config.why_no_text_graph(PRODUCT)
    if not why and config.get("is_encoder_decoder"):
        return f"the model is of the kind {config.description} with a separate encoder, of which no {PRODUCT} is made"
    return why
