"""The format ``gguf``: one file with weights, vocabulary and chat template, for llama.cpp, Ollama and programs built on them."""

from __future__ import annotations

from slipway.formats import (
    Fit,
    Format,
    FormatRequest,
    FormatSettings,
    LevelSettings,
    ModelSize,
    PlannedTask,
    Quantization,
    RefusedLevel,
    Runtime,
    Usage,
)
from slipway.model.families import DECODER, FEATURE_EXTRACTION, SEQUENCE_CLASSIFIER
from slipway_gguf.params import INPUT_ROUNDINGS, LEVELS, UNQUANTIZED, GGUFParams
from slipway_gguf.stage import output_bytes

_USUAL = ("q4_k_m", "q5_k_m", "q6_k", "q8_0", "iq4_xs", "q4_0", "", "bf16")
"""Levels that llama.cpp runs on all targets, the most common first."""


class GGUFConfiguration(LevelSettings):
    """The model as one GGUF file per level, for llama.cpp and Ollama. ``f16`` in the list of levels is the unquantized file."""


def plan(request: FormatRequest[GGUFConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan a file for each level; first measure the importance of inputs if a level uses it and there is text."""
    wanted = [level for level in request.levels if LEVELS[level].weighs]
    measured = PlannedTask(
        id="importance",
        stage="importance",
        params={},
        inputs={"model": request.model, "data": request.text},
        output="importance",
        fallback="all inputs count alike when weights are rounded",
    )
    files = tuple(
        PlannedTask(
            id="-".join(filter(None, ("gguf", level))),
            stage="gguf",
            params={
                "type": level or UNQUANTIZED,
                "name": request.file_name,
                "base_model": request.base_model,
            },
            inputs={
                "pytorch": request.model,
                **({"importance": measured.reference} if request.text and level in wanted else {}),
            },
            format="-".join(filter(None, (request.name, level))),
            output="gguf",
        )
        for level in ("", *request.levels)
    )
    return (measured, *files) if request.text and wanted else files


def level_bytes(_: FormatSettings, level: str, size: ModelSize) -> int:
    """Estimate an output's size."""
    return output_bytes(GGUFParams.model_validate({"type": level or UNQUANTIZED}), size)


FORMAT = Format(
    name="gguf",
    title="GGUF",
    settings=GGUFConfiguration,
    plan=plan,
    levels=tuple(name for name in LEVELS if name not in ("f32", UNQUANTIZED)),
    quantization=Quantization(
        unquantized=UNQUANTIZED,
        text_levels=tuple(name for name, level in LEVELS.items() if level.weighs),
        refused={
            "fp16": RefusedLevel("its unquantized file is float16", instead=UNQUANTIZED),
            "int8": RefusedLevel("llama.cpp has types of its own", instead="q8_0"),
            "w8a8": RefusedLevel("llama.cpp has types of its own", instead="q8_0"),
            "int4": RefusedLevel("llama.cpp has types of its own", instead="q4_k_m"),
            "int3": RefusedLevel("llama.cpp has types of its own", instead="q4_k_m"),
        },
    ),
    rank=30,
    output_bytes=level_bytes,
    runtime=Runtime(
        name="llama.cpp",
        files=("*.gguf",),
        load="slipway_gguf.runtime:load",
        families=(DECODER.name, FEATURE_EXTRACTION.name, SEQUENCE_CLASSIFIER.name),
        reads_text=True,
        explain="slipway_gguf.diagnosis:explain",
        stored="slipway_gguf.runtime.stored:stored",
        rounds=INPUT_ROUNDINGS,
        halves_encoder=True,
        precision_file="gguf.json",
    ),
    usage=Usage(
        template=("slipway_gguf", "usage.example.j2"),
        library="gguf",
        packages="xllamacpp",
    ),
    fits=tuple(
        Fit(target, why, levels=_USUAL, rank=rank, source="services/gguf/README.md")
        for target, why, rank in (
            ("llama.cpp", "llama.cpp, Ollama and LM Studio load this file and no other", 0),
            ("apple", "llama.cpp computes it on Apple's GPUs (Metal)", 0),
            ("edge", "llama.cpp runs on small processors, and maps the file instead of reading it", 0),
            ("cpu-server", "llama.cpp runs on any processor, one user at a time", 20),
            ("android", "llama.cpp runs in Android apps, on the processor", 30),
        )
    ),
    media_types={".gguf": "application/vnd.gguf"},
)
