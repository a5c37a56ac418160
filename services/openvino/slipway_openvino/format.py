"""The format ``openvino``: an IR with its state, its tokenizer and levels of its weights."""

from __future__ import annotations

from dataclasses import replace

from slipway.formats import (
    GRAPH_BYTES,
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
    quantized,
)
from slipway.levels import bits_of
from slipway.model.families import DECODER, ENCODER_DECODER, SPEECH
from slipway_openvino.params import DECODER_MODEL, FAMILIES, MODEL

GRAPHS = "onnx"
"""The format whose quantizer rounds the weights of the graph."""


class OpenVinoConfiguration(LevelSettings):
    """The model as an OpenVINO IR.

    Attributes:
        tokenizer: Convert the tokenizer too, so that openvino-genai runs the folder.
    """

    tokenizer: bool = True


def plan(request: FormatRequest[OpenVinoConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan a graph of standard operators, its integer levels, and the IR of each."""
    graph = PlannedTask(
        id=f"onnx_export-{request.name}",
        stage="onnx_export",
        params={"engine": "auto", "optimization": "basic"},
        inputs={"pytorch": request.model},
        output="onnx",
    )
    integers = tuple(level for level in request.levels if bits_of(level))
    asked = quantized(replace(request, name=GRAPHS, levels=integers), graph.reference)
    rounded = {
        level: replace(task, id=f"quantize-{request.name}-{level}", format="")
        for level, task in zip(integers, asked, strict=True)
    }
    graphs = {level: rounded.get(level, graph).reference for level in ("", *request.levels)}
    converted = (_convert(request, level, source) for level, source in graphs.items())
    return (graph, *rounded.values(), *converted)


def _convert(request: FormatRequest[OpenVinoConfiguration], level: str, graph: str) -> PlannedTask:
    name = f"{request.name}-{level}" if level else request.name
    return PlannedTask(
        id=name,
        stage="openvino",
        params={"level": level, "tokenizer": request.settings.tokenizer},
        inputs={"onnx": graph},
        format=name,
        output="openvino",
    )


def output_bytes(_: FormatSettings, level: str, size: ModelSize) -> int:
    """Estimate an output's size; it has the tokenizer twice."""
    return (size.at_level(level) + GRAPH_BYTES if level else size.graph_bytes) + size.companion_bytes


FORMAT = Format(
    name="openvino",
    title="OpenVINO",
    settings=OpenVinoConfiguration,
    plan=plan,
    levels=("fp16", "int8", "int4"),
    quantization=Quantization(
        refused={"bf16": RefusedLevel("its processors take weights of 16 bits in float16", instead="fp16")},
        calibrated=True,
    ),
    rank=30,
    output_bytes=output_bytes,
    runtime=Runtime(
        name="openvino",
        files=(MODEL, DECODER_MODEL),
        load="slipway_openvino.runtime:load",
        stored="slipway_openvino.stored.weights:stored",
        families=tuple(family.name for family in FAMILIES),
        precision_file="openvino_export.json",
        stored_dtype="float32",
        # Norms, biases and angle tables are float16 too; the yardstick has them in float32. A rounded norm changes a product's input.
        rounds={"fp16": "float16"},
    ),
    usage=Usage(
        template=("slipway_openvino", "usage.example.j2"),
        library="openvino",
        packages="openvino openvino-tokenizers numpy",
        family_packages={
            DECODER.name: "openvino-genai",
            # Translators have two vocabularies, which the file of tokenizers does not hold.
            ENCODER_DECODER.name: "openvino transformers sentencepiece numpy",
            SPEECH.name: "openvino transformers numpy",
        },
    ),
    fits=(
        Fit(
            "cpu-server",
            "OpenVINO runs on processors of Intel and AMD, and on Intel's GPUs and NPUs",
            levels=("int4", "int8", ""),
            families=("decoder",),
            rank=15,
            source="https://docs.openvino.ai/",
        ),
        Fit(
            "cpu-server",
            "OpenVINO runs on processors of Intel and AMD, and on Intel's GPUs and NPUs",
            levels=("int8", "fp16", ""),
            rank=15,
            source="https://docs.openvino.ai/",
        ),
        Fit("edge", "OpenVINO runs on small Intel machines and their NPUs", levels=("int4", "int8"), rank=25),
    ),
    media_types={".xml": "application/xml"},
)
