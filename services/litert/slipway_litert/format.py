"""The format ``litert``: a program for LiteRT (``.tflite``), the runtime that Android has and small machines take."""

from __future__ import annotations

from pydantic import Field

from slipway.formats import (
    Fit,
    Format,
    FormatRequest,
    LevelSettings,
    Needs,
    PlannedTask,
    Quantization,
    RefusedLevel,
    Requirements,
    Runtime,
    Usage,
    one_per_level,
)
from slipway.model.families import FAMILIES, TEXT_FAMILIES
from slipway_litert.params import LEVEL


class LitertConfiguration(LevelSettings):
    """A program for LiteRT (``model.tflite``), the runtime that was TensorFlow Lite.

    Attributes:
        max_length: Most tokens of a text; a decoder's KV cache has room for as many. A model of fewer positions takes as many as it has.
        call_length: Tokens that a decoder's prefill takes in one call. Longer prompts take several calls.
    """

    max_length: int = Field(default=1024, ge=2, le=1 << 20)
    call_length: int = Field(default=128, ge=2, le=1 << 20)


def plan(request: FormatRequest[LitertConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan one task for each level, and one for the float32 program if it is requested."""
    settings = request.settings
    return one_per_level(
        request,
        "litert",
        {"pytorch": request.model},
        lambda level: {
            "level": level,
            "max_length": settings.max_length,
            "call_length": settings.call_length,
        },
        requirements=Requirements(any_of=(Needs(libraries=("litert-torch",)),)),
    )


FORMAT = Format(
    name="litert",
    title="LiteRT",
    settings=LitertConfiguration,
    plan=plan,
    levels=(LEVEL,),
    quantization=Quantization(refused={"int4": RefusedLevel("its 4-bit weights are not made here", instead=LEVEL)}),
    rank=45,
    output_bytes=lambda _, level, size: size.program_bytes(level),
    runtime=Runtime(
        name="litert",
        files=("*.tflite",),
        load="slipway_litert.runtime:load",
        families=tuple(family.name for family in FAMILIES if family in TEXT_FAMILIES),
        prefers=Needs(libraries=("ai-edge-litert",)),
        precision_file="litert.json",
    ),
    usage=Usage(
        template=("slipway_litert", "usage.example.j2"),
        library="tflite",
        packages="ai-edge-litert tokenizers numpy",
        chat_packages="ai-edge-litert transformers jinja2 numpy",
    ),
    fits=(
        Fit(
            "android",
            "LiteRT is part of Google's Android, and runs on its processors",
            levels=(LEVEL, ""),
            rank=10,
            source="https://ai.google.dev/edge/litert",
        ),
        Fit(
            "edge",
            "LiteRT's runtime is small, and its shapes are fixed",
            levels=(LEVEL, ""),
            rank=35,
            source="https://ai.google.dev/edge/litert",
        ),
    ),
    media_types={".tflite": "application/vnd.tensorflow.tflite"},
)
