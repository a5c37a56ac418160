"""The format ``executorch``: a program for ExecuTorch's runtime, which applications on phones and small machines link."""

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
from slipway_executorch.params import GROUP_SIZES, LEVEL


class ExecutorchConfiguration(LevelSettings):
    """A program for ExecuTorch (``model.pte``), with XNNPACK for CPUs.

    Attributes:
        max_length: Most tokens of a text; a decoder's KV cache has room for as many. A model of fewer positions takes as many as it has.
        call_length: Most tokens that a decoder takes in one call; memory for their logits is planned. Longer prompts take several calls.
    """

    max_length: int = Field(default=1024, ge=2, le=1 << 20)
    call_length: int = Field(default=128, ge=2, le=1 << 20)


def plan(request: FormatRequest[ExecutorchConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan one task for each level, and one for the float32 program if it is requested."""
    settings = request.settings
    return one_per_level(
        request,
        "executorch",
        {"pytorch": request.model},
        lambda level: {
            "level": level,
            "max_length": settings.max_length,
            "call_length": settings.call_length,
            **({} if level == "none" else {"group_size": request.group_size}),
        },
        requirements=Requirements(any_of=(Needs(libraries=("executorch", "torchao")),)),
    )


FORMAT = Format(
    name="executorch",
    title="ExecuTorch",
    settings=ExecutorchConfiguration,
    plan=plan,
    levels=(LEVEL,),
    quantization=Quantization(
        refused={
            "int4": RefusedLevel("XNNPACK multiplies 4-bit weights by 8-bit activations", instead=LEVEL),
            "int8": RefusedLevel("its 8-bit weights are not made here", instead=LEVEL),
        },
        group_sizes=GROUP_SIZES,
    ),
    rank=40,
    output_bytes=lambda _, level, size: size.program_bytes(level),
    runtime=Runtime(
        name="executorch",
        files=("*.pte",),
        load="slipway_executorch.runtime:load",
        families=tuple(family.name for family in FAMILIES if family in TEXT_FAMILIES),
        prefers=Needs(libraries=("executorch",)),
        precision_file="executorch.json",
        rounds={"8da4w": "int8/row"},
    ),
    usage=Usage(
        template=("slipway_executorch", "usage.example.j2"),
        library="executorch",
        packages="executorch tokenizers torch",
        chat_packages="executorch transformers jinja2 torch",
    ),
    fits=tuple(
        Fit(target, why, levels=(LEVEL, ""), rank=rank, source="https://docs.pytorch.org/executorch/")
        for target, why, rank in (
            ("android", "ExecuTorch runs in Android apps, with XNNPACK on the processor", 0),
            ("apple", "ExecuTorch runs in apps for iPhone and iPad, with XNNPACK on the processor", 20),
            ("edge", "ExecuTorch's runtime is small, and its memory is planned ahead", 30),
        )
    ),
    media_types={".pte": "application/vnd.pytorch.executorch"},
)
