"""The format ``litert``: a program for LiteRT (``.tflite``), the runtime that Android has and small machines take."""

from __future__ import annotations

from pydantic import Field

from slipway.formats import (
    LEVELS,
    Fit,
    Format,
    FormatRequest,
    FormatSettings,
    LevelSettings,
    ModelSize,
    Needs,
    PlannedTask,
    Quantization,
    RefusedLevel,
    Requirements,
    Runtime,
    Usage,
)
from slipway.model.families import FAMILIES, TEXT_FAMILIES
from slipway_litert.params import LEVEL

PROGRAM_BYTES = 4 << 20
"""Size of a program's instructions, without weights."""


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
    levels = (*(("none",) if settings.unquantized else ()), *request.levels)
    return tuple(
        PlannedTask(
            id=request.name if level == "none" else f"{request.name}-{level}",
            stage="litert",
            params={"level": level, "max_length": settings.max_length, "call_length": settings.call_length},
            inputs={"pytorch": request.model},
            format=request.name if level == "none" else f"{request.name}-{level}",
            requirements=Requirements(any_of=(Needs(libraries=("litert-torch",)),)),
            output="litert",
        )
        for level in levels
    )


def output_bytes(_: FormatSettings, level: str, size: ModelSize) -> int:
    """Return an upper bound of an output's size: a matrix that is tied to the embedding is stored twice."""
    weight = LEVELS[level].bytes_per_weight if level in LEVELS else 4
    return int((size.weights + size.largest) * weight) + size.companion_bytes + PROGRAM_BYTES


FORMAT = Format(
    name="litert",
    title="LiteRT",
    settings=LitertConfiguration,
    plan=plan,
    levels=(LEVEL,),
    quantization=Quantization(refused={"int4": RefusedLevel("its 4-bit weights are not made here", instead=LEVEL)}),
    rank=45,
    output_bytes=output_bytes,
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
