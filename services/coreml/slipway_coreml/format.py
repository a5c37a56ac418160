"""The format ``coreml``: a package for Core ML, which runs models on Apple's processors, GPUs and neural engines."""

from __future__ import annotations

from typing import Literal

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
    return one_per_level(
        request,
        "coreml",
        {"pytorch": request.model},
        lambda level: {
            "level": level,
            "precision": settings.precision,
            "max_length": settings.max_length,
            "call_length": settings.call_length,
            **({"group_size": request.group_size} if level == "int4" else {}),
        },
        requirements=Requirements(any_of=(Needs(libraries=("coremltools",)),)),
    )


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
    output_bytes=lambda _, level, size: size.program_bytes(level),
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
