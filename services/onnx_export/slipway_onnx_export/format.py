"""The format ``onnx``: the model as an ONNX graph with KV cache."""

from __future__ import annotations

from pydantic import Field, field_validator

from slipway.formats import (
    GRAPH_BYTES,
    Format,
    FormatRequest,
    LevelSettings,
    ModelSize,
    PlannedTask,
    RefusedLevel,
    Runtime,
    Usage,
    quantized,
    wrong_value,
)
from slipway_onnx_export.activations.settings import Activations, activation_params


class OnnxConfiguration(LevelSettings):
    """The model as an ONNX graph with KV cache.

    Attributes:
        opset_version: Operator set to write, 7 to 26; 0 lets the engine choose its best.
        dynamic_axes: Dynamic batch, sequence and past length.
        optimize_graph: Fuse for ONNX Runtime; false writes standard operators only.
        activations: Activations to return beside the results: ``layers`` (numbers from 0, ``last`` or ``all``) and ``kinds``
            (``hidden_states``, ``attentions``, ``mlp``, ``embeddings``), such as ``{layers: [0, 5, 11], kinds: [attentions]}``, or as
            text ``layers=0,5,11,kinds=attentions``. If only one is given, the other is all layers or ``hidden_states``.
    """

    enabled: bool = True
    opset_version: int = Field(default=0, examples=[0, *range(14, 25)])
    dynamic_axes: bool = True
    optimize_graph: bool = True
    activations: Activations = Field(default_factory=dict)

    @field_validator("opset_version")
    @classmethod
    def _known_opset(cls, value: int) -> int:
        if value != 0 and not 7 <= value <= 26:
            raise wrong_value(value, "is not an opset that an engine writes", "use 7 to 26, or 0 for the engine's best")
        return value


def plan(request: FormatRequest[OnnxConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan the export of the merged model and the levels of the graph."""
    exported = PlannedTask(
        id="onnx_export",
        stage="onnx_export",
        params={
            "engine": "auto",
            "opset": request.settings.opset_version or None,
            "dynamic_axes": request.settings.dynamic_axes,
            "optimize_graph": request.settings.optimize_graph,
            **activation_params(request.settings.activations),
        },
        inputs={"pytorch": request.model},
        format=request.name,
        output="onnx",
    )
    return (exported, *quantized(request, exported.reference))


def output_bytes(level: str, size: ModelSize) -> int:
    """Estimate an output's size."""
    return size.at_level(level) + GRAPH_BYTES if level else size.graph_bytes


FORMAT = Format(
    name="onnx",
    title="ONNX",
    settings=OnnxConfiguration,
    plan=plan,
    levels=("fp16", "int8", "int4"),
    refused_levels={"bf16": RefusedLevel("ONNX Runtime has no bf16 kernels on CPU", instead="fp16")},
    rank=10,
    flags={"--layers": "activations.layers"},
    output_bytes=output_bytes,
    runtime=Runtime(
        name="onnxruntime",
        files=("model.onnx", "encoder_model.onnx"),
        load="slipway_validate.runner.onnx_graphs.load:load",
        families=None,
        precision_file="onnx_export.json",
        stored_dtype="float32",
        inspect="slipway_onnx_export.inspection.stage:INSPECTION",
    ),
    quantizer="slipway_quantize.own_quantizers:GRAPHS",
    usage=Usage(
        template=("slipway_onnx_export", "usage.example.j2"),
        library="onnx",
        packages="onnxruntime tokenizers numpy",
        # transformers applies a chat template with jinja2, which torch depends on and transformers does not.
        chat_packages="onnxruntime transformers jinja2 numpy",
    ),
    media_types={".onnx": "application/vnd.onnx"},
    sample='{enabled: true, dynamic_axes: true, optimize_graph: true, quantization: ["int8", "int4"]}',
)
