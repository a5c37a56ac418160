"""The format ``coreml``: a package for Core ML, which runs models on Apple's processors, GPUs and neural engines."""

from __future__ import annotations

from typing import Literal

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

PROGRAM_BYTES = 4 << 20
"""Size of a program's instructions, without weights."""


class CoremlConfiguration(LevelSettings):
    """A Core ML package (``model.mlpackage``) for iOS 18, macOS 15 and later.

    Attributes:
        precision: Type in which the program computes, and in which weights are stored that no level rounds. ``float32`` keeps Core ML from the neural engine.
        max_length: Most tokens of a text; a decoder's KV cache has room for as many. A model of fewer positions takes as many as it has.
        call_length: Most tokens that a decoder takes in one call. Longer prompts take several calls.
    """

    precision: Literal["float16", "float32"] = "float16"
    max_length: int = Field(default=1024, ge=2, le=1 << 20)
    call_length: int = Field(default=128, ge=2, le=1 << 20)


def plan(request: FormatRequest[CoremlConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan one task for each level, and one for the unquantized package if it is requested."""
    settings = request.settings
    levels = (*(("none",) if settings.unquantized else ()), *request.levels)
    names = {level: request.name if level == "none" else f"{request.name}-{level}" for level in levels}
    return tuple(
        PlannedTask(
            id=name,
            stage="coreml",
            params={
                "level": level,
                "precision": settings.precision,
                "max_length": settings.max_length,
                "call_length": settings.call_length,
                **({"group_size": request.group_size} if level == "int4" else {}),
            },
            inputs={"pytorch": request.model},
            format=name,
            requirements=Requirements(any_of=(Needs(libraries=("coremltools",)),)),
            output="coreml",
        )
        for level, name in names.items()
    )


def output_bytes(_: FormatSettings, level: str, size: ModelSize) -> int:
    """Return an upper bound of an output's size: ``precision`` may be float32, and a tied matrix may be stored twice."""
    weight = LEVELS[level].bytes_per_weight if level in LEVELS else 4
    return int((size.weights + size.largest) * weight) + size.companion_bytes + PROGRAM_BYTES


FORMAT = Format(
    name="coreml",
    title="Core ML",
    settings=CoremlConfiguration,
    plan=plan,
    levels=("int8", "int4"),
    quantization=Quantization(
        refused={"fp16": RefusedLevel("it is not a level: the package computes and stores float16", instead="none")}
    ),
    rank=45,
    output_bytes=output_bytes,
    runtime=Runtime(
        name="coreml",
        files=("*.mlpackage",),
        load="slipway_coreml.runtime:load",
        families=tuple(family.name for family in FAMILIES if family in TEXT_FAMILIES),
        precision_file="coreml.json",
    ),
    usage=Usage(
        template=("slipway_coreml", "usage.example.j2"),
        library="coreml",
        packages="coremltools tokenizers numpy",
        chat_packages="coremltools transformers jinja2 numpy",
    ),
    fits=(
        Fit(
            "apple",
            "Core ML is part of iOS and macOS, and runs on the processor, the GPU and the neural engine",
            levels=("int4", "int8", ""),
            families=("decoder",),
            rank=10,
            source="https://apple.github.io/coremltools/",
        ),
        Fit(
            "apple",
            "Core ML is part of iOS and macOS, and runs on the processor, the GPU and the neural engine",
            levels=("int8", ""),
            rank=10,
            source="https://apple.github.io/coremltools/",
        ),
    ),
    media_types={".mlmodel": "application/vnd.apple.coreml.model"},
)
