"""The format ``onnx``: the model as one ONNX graph or several, with a KV cache if it generates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from slipway.formats import (
    GRAPH_BYTES,
    Fit,
    Format,
    FormatRequest,
    LevelSettings,
    ModelSize,
    PlannedTask,
    Problem,
    Quantization,
    RefusedLevel,
    Runtime,
    SectionRules,
    Usage,
    quantized,
    wrong_value,
)
from slipway.machine.onnx_runtime import ProviderChoice
from slipway.model.families import ENCODER_DECODER, FAMILIES, RAW_SPEECH, SPEECH
from slipway.settings.sections import as_tuple
from slipway_onnx_export.packaging.kinds import package_bytes
from slipway_onnx_export.params import Attention, EngineName, Optimization, PackageKind, Parts, Shapes
from slipway_onnx_export.settings import Activations, StaticShape, activation_params

_GENERATES = tuple(each.name for each in FAMILIES if each.generates)
_READS = tuple(each.name for each in FAMILIES if not each.generates)
_A_TEXT = 8
"""Fewest tokens of a call that holds a whole text; a shorter call continues the text in the cache."""
_OPSETS = range(7, 27)
"""Opsets that may be asked for, besides 0."""
SMOOTHING = 0.75
"""Better than 0.5 on trained models, because weights have scales of their own per output feature and lose little."""


class OnnxConfiguration(LevelSettings):
    """The model as one ONNX graph or, with an encoder and a decoder, as two; of a model that generates with a KV cache.

    Attributes:
        opset_version: Operator set to write. Engines write 14 to 24; any other from 7 to 26 is replaced by one of them, with a warning.
            0 lets the engine choose its best, or the recovery profile.
        shapes: ``dynamic``: batch, sequence and past vary. ``batch``: the batch is fixed. ``static``: every axis is. If not set, the recovery
            profile decides, by default for ``dynamic``.
        dynamic_axes: An earlier spelling of ``shapes``: true is ``dynamic``, false ``batch``.
        optimize_graph: Fuse for ONNX Runtime; false writes standard operators only. If not set, the recovery profile decides, by
            default for true.
        optimization_times: Measure the time of a prompt and of a token before and after the graph's optimization, for the report; each
            graph is made a second time for it.
        gelu_approximation: Compute GELU by ONNX Runtime's own approximation (``FastGelu``), which is faster and differs by 5e-4 at most; the
            graph is compared with PyTorch before and after it.
        engine: Engine that makes the graph: ``mobius`` builds it, ``dynamo`` and ``legacy`` trace the model; ``auto`` chooses.
        attention: transformers' attention that is traced; ``auto`` chooses.
        static_shape: ``[batch, sequence, past]`` where they are fixed, by ``shapes`` or because no graph with dynamic axes can be made; 0
            chooses. Also by the axes' names (``batch``, ``sequence``, ``past_sequence``, ``total_sequence``, ``encoder_sequence``), of all inputs,
            ``{batch: 1, sequence: 16}``, or of each, ``{input_ids: {sequence: 16}, past_key_values: {past_sequence: 240}}``, as text
            ``input_ids.sequence=16,past_sequence=240``.
        external_data: Weights in a file beside the graph; false puts them into it, for the unquantized graph and each level, 2 GB at most.
        past_present_share_buffer: Make a graph for the fastest serving: keys and values of past and present tokens may be one buffer.
            Rows are then padded on the right, and only a single row takes several tokens after a past. If the model has no such
            form, the graph is the usual one.
        logits_to_keep: 1 computes logits of the last token of each row only, which makes long prompts faster; 0 of all tokens.
        provider: ONNX Runtime's execution provider in comparison and validation: ``cuda``, ``cpu``, or ``auto`` for the GPU if there is
            one and the installed build of ONNX Runtime can use it.
        packaging: Runtimes that shall take the folders unchanged: `genai`, `transformers_js`, `optimum`, `triton`, `kserve`. Files for
            them are added to each level.
        activations: Activations to return beside the results: ``layers`` (numbers from 0, ``last`` or ``all``) and ``kinds``
            (``hidden_states``, ``attentions``, ``cross_attentions``, ``mlp``, ``embeddings``), such as
            ``{layers: [0, 5, 11], kinds: [attentions]}``, or as text ``layers=0,5,11,kinds=attentions``. If only one is given, the other is all layers or ``hidden_states``.
        parts: Of a model that takes images: its ``text`` part alone, or ``all``: graphs that make features of pictures and put them among
            the embeddings of text, beside the decoder.
        layered: One graph per layer of a text decoder, in ``onnx-layered/``, with a program that runs them in turn. It has no quantized
            levels and no packages.
        int8_ranges: How ``int8_static`` finds the ranges of activations on text: the largest magnitude (``minmax``), the least loss of
            information (``entropy``), a ``percentile``, or ``auto`` for what diverges least on held-out windows of the text.
        int8_smoothing: Share of the activations' outliers that ``int8_static`` moves into the weights (SmoothQuant), 0 to 1; 0 moves none.
    """

    enabled: bool = True
    opset_version: int = Field(default=0, examples=[0, *range(14, 25)], json_schema_extra={"enum": [0, *_OPSETS]})
    shapes: Shapes | None = None
    dynamic_axes: bool | None = None
    optimize_graph: bool | None = None
    optimization_times: bool = False
    gelu_approximation: bool = False
    engine: EngineName = "auto"
    attention: Attention = "auto"
    static_shape: StaticShape = StaticShape(batch=1, sequence=0, past=0)
    external_data: bool = True
    past_present_share_buffer: bool = False
    logits_to_keep: int = Field(default=0, ge=0, le=1)
    provider: ProviderChoice = "auto"
    packaging: Annotated[tuple[PackageKind, ...], BeforeValidator(as_tuple)] = ()
    activations: Activations = Field(default_factory=dict)
    parts: Parts = "text"
    layered: bool = False
    int8_ranges: Literal["auto", "minmax", "entropy", "percentile"] = "auto"
    int8_smoothing: float = Field(default=SMOOTHING, ge=0, le=1)

    @property
    def wanted_shapes(self) -> Shapes | None:
        """Return the shapes that are set, in either spelling; None if they are not."""
        if self.shapes is not None or self.dynamic_axes is None:
            return self.shapes
        return "dynamic" if self.dynamic_axes else "batch"

    @field_validator("opset_version")
    @classmethod
    def _check_opset(cls, value: int) -> int:
        if value != 0 and value not in _OPSETS:
            raise wrong_value(
                value, "is not an opset that an engine writes", "use 14 to 24, or 0 for the engine's best"
            )
        return value


def conflicts(settings: OnnxConfiguration) -> Iterable[Problem]:
    """Yield the settings that contradict each other."""
    if settings.shapes is not None and settings.dynamic_axes not in (None, settings.shapes == "dynamic"):
        said = "true" if settings.dynamic_axes else "false"
        message = f"dynamic_axes {said} is an earlier spelling, and contradicts shapes {settings.shapes}"
        yield Problem("dynamic_axes", message, "leave formats.onnx.dynamic_axes out")
    if settings.gelu_approximation and settings.optimize_graph is False:
        message = (
            "gelu_approximation is an operator of ONNX Runtime, and optimize_graph false writes standard operators only"
        )
        yield Problem("gelu_approximation", message, "leave formats.onnx.optimize_graph or gelu_approximation out")
    if settings.logits_to_keep and settings.wanted_shapes == "static":
        message = (
            "a graph with fixed shapes returns logits of all tokens, because the last places of a call may be empty"
        )
        yield Problem("logits_to_keep", message, "leave formats.onnx.logits_to_keep out, or set shapes to batch")
    if settings.past_present_share_buffer:
        yield from _buffer_conflicts(settings)
    if settings.engine == "mobius" and settings.attention != "auto":
        message = f"attention {settings.attention} cannot be chosen for engine mobius, which does not trace the model"
        yield Problem("attention", message, "set formats.onnx.engine to dynamo or legacy")
    yield from _parts_conflicts(settings)
    if not settings.layered:
        return
    if settings.engine == "mobius":
        yield Problem("layered", "engine mobius makes whole graphs only", "set formats.onnx.engine to dynamo or legacy")
    if settings.activations:
        yield Problem("layered", "layered graphs return no activations", "leave formats.onnx.activations out")
    if settings.logits_to_keep:
        yield Problem("layered", "layered graphs return logits of all tokens", "leave formats.onnx.logits_to_keep out")


def cautions(settings: OnnxConfiguration) -> Iterable[str]:
    """Warn that a model in layers has no quantized levels and no packages."""
    if settings.layered and (settings.quantization or settings.packaging):
        yield "formats.onnx.layered: a model in layers has no quantized levels and no packages; they are not made"


def _buffer_conflicts(settings: OnnxConfiguration) -> Iterable[Problem]:
    others = {
        "optimize_graph": (
            settings.optimize_graph is False,
            "optimize_graph false leaves out the operator that it needs",
        ),
        "engine": (settings.engine in ("dynamo", "legacy"), f"engine {settings.engine} does not write it"),
        "attention": (settings.attention != "auto", "the engine that writes it does not trace attention"),
        "activations": (bool(settings.activations), "the engine that writes it returns no activations"),
        "layered": (settings.layered, "the engine that writes it makes whole graphs only"),
        "shapes": (settings.wanted_shapes == "static", "its length would be fixed"),
    }
    for name, (conflicting, why) in others.items():
        if conflicting:
            yield Problem(
                "past_present_share_buffer", f"a shared buffer is not possible: {why}", f"leave formats.onnx.{name} out"
            )


def _parts_conflicts(settings: OnnxConfiguration) -> Iterable[Problem]:
    """Yield the settings that graphs for images cannot have."""
    others = {
        "engine": (settings.engine == "mobius", "are traced, and engine mobius builds graphs"),
        "shapes": (settings.wanted_shapes not in (None, "dynamic"), "have shapes that vary"),
        "past_present_share_buffer": (settings.past_present_share_buffer, "have no form with a shared buffer"),
        "logits_to_keep": (bool(settings.logits_to_keep), "return logits of all tokens"),
        "activations": (bool(settings.activations), "return no activations"),
        "layered": (settings.layered, "are whole"),
    }
    for name, (conflicting, why) in others.items():
        if conflicting and settings.parts == "all":
            remedy = f"leave formats.onnx.{name} out, or set formats.onnx.parts to text"
            yield Problem("parts", f"graphs of a model that takes images {why}", remedy)


def plan(request: FormatRequest[OnnxConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan the export of the merged model and the levels of the graph."""
    inline = {} if request.settings.external_data else {"external_data": False}
    exported = PlannedTask(
        id="onnx_export",
        stage="onnx_export",
        params=first_attempt(request.settings, request.profile)
        | ({} if request.settings.provider == "auto" else {"provider": request.settings.provider})
        | ({"optimization_times": True} if request.settings.optimization_times else {})
        | ({"gelu_approximation": True} if request.settings.gelu_approximation else {})
        | inline
        | ({"packaging": request.settings.packaging} if request.settings.packaging else {})
        | ({"past_present_share_buffer": True} if request.settings.past_present_share_buffer else {})
        | ({"logits_to_keep": request.settings.logits_to_keep} if request.settings.logits_to_keep else {})
        | activation_params(request.settings.activations)
        | ({"layered": True, "shapes": request.settings.wanted_shapes or "dynamic"} if request.settings.layered else {})
        | ({"parts": "all", "shapes": "dynamic"} if request.settings.parts == "all" else {}),
        inputs={"pytorch": request.model},
        format=request.name,
        output="onnx",
        open=open_choices(request.settings, request.profile),
    )
    ranges = {"activation_ranges": request.settings.int8_ranges, "smoothing": request.settings.int8_smoothing}
    levels = (
        replace(task, params={**task.params, **inline, **(ranges if task.params["level"] == "int8_static" else {})})
        for task in quantized(request, exported.reference)
    )
    return (exported, *levels)


@dataclass(frozen=True, slots=True)
class _Start:
    """The first attempt of a recovery profile, where the settings leave it open."""

    opset: int | None
    shapes: Shapes
    optimization: Optimization


_STARTS = {
    "conservative": _Start(opset=14, shapes="batch", optimization="none"),
    "balanced": _Start(opset=17, shapes="dynamic", optimization="basic"),
    "aggressive": _Start(opset=None, shapes="dynamic", optimization="all"),
}
"""The oldest opset that engines write, one that most runtimes know, and the engine's best."""


def first_attempt(settings: OnnxConfiguration, profile: str) -> dict[str, Any]:
    """Return the parameters of the first attempt: what is set, otherwise what the recovery profile says.

    ``auto`` begins with the most capable parameters. Making a graph needs no memory for weights, so the model's size does not matter.
    """
    start = _STARTS.get(profile, _STARTS["aggressive"])
    optimization = start.optimization
    if settings.optimize_graph is not None:
        optimization = "all" if settings.optimize_graph else "basic"
    if settings.past_present_share_buffer:
        optimization = "all"
    shape = settings.static_shape
    return {
        "engine": settings.engine,
        "opset": settings.opset_version or start.opset,
        "shapes": settings.wanted_shapes or start.shapes,
        "batch": shape.batch,
        "sequence": shape.sequence or None,
        "past": shape.past or None,
        "attention": settings.attention,
        "optimization": optimization,
    }


def open_choices(settings: OnnxConfiguration, profile: str) -> tuple[str, ...]:
    """Return the parameters that neither a setting nor a recovery profile chose."""
    if profile != "auto":
        return ()
    unset = {
        "engine": settings.engine == "auto",
        "opset": not settings.opset_version,
        "attention": settings.attention == "auto",
        "shapes": settings.wanted_shapes is None,
        "optimization": settings.optimize_graph is None,
        "cache": True,
        "tracer_warnings": True,
    }
    return tuple(name for name, is_open in unset.items() if is_open)


def output_bytes(settings: OnnxConfiguration, level: str, size: ModelSize) -> int:
    """Estimate an output's size, with its packages."""
    graph = size.at_level(level) + GRAPH_BYTES if level else size.graph_bytes
    return graph + package_bytes(settings.packaging, graph, size)


def longest_text(settings: OnnxConfiguration) -> int:
    """Return how many tokens a graph of fixed shapes has room for; 0 if no setting says it."""
    if settings.wanted_shapes != "static":
        return 0
    shape = settings.static_shape
    return shape.past + 1 if shape.past else shape.sequence if shape.sequence >= _A_TEXT else 0


FORMAT = Format(
    name="onnx",
    title="ONNX",
    settings=OnnxConfiguration,
    plan=plan,
    levels=("fp16", "int8", "int8_dynamic", "int8_static", "int4"),
    quantization=Quantization(
        refused={"bf16": RefusedLevel("ONNX Runtime has no bf16 kernels on CPU", instead="fp16")},
        calibrated=True,
        quantizer="slipway_quantize.own_quantizers:GRAPHS",
        packager="slipway_onnx_export.packaging.packages:complete_level",
    ),
    rules=SectionRules(
        conflicts=conflicts,
        cautions=cautions,
        flags={"--layers": "activations.layers"},
        sample='{enabled: true, shapes: dynamic, optimize_graph: true, quantization: ["int8", "int4"]}',
    ),
    rank=10,
    output_bytes=output_bytes,
    longest_text=longest_text,
    runtime=Runtime(
        name="onnxruntime",
        files=("model.onnx", "encoder_model.onnx", "onnx-layered/head.onnx"),
        load="slipway_validate.runner.onnx_graphs.load:load",
        families=None,
        precision_file="onnx_export.json",
        stored_dtype="float32",
        # MatMulNBits computes with inputs of 8 bits in blocks of its groups (accuracy_level 4).
        rounds={
            "fp16": "results/float16",
            "int8": "int8/32",
            "int4": "int8/32",
            "int8_dynamic": "int8/row",
            "int8_static": "static",
        },
        inspect="slipway_onnx_export.inspection.stage:INSPECTION",
    ),
    fits=(
        Fit(
            "browser",
            "onnxruntime-web and transformers.js load the folder; a page downloads all of it, so it must be small",
            levels=("int4", "fp16", "int8_dynamic"),
            rank=0,
            settings={"packaging": ["transformers_js"]},
            source="https://huggingface.co/docs/transformers.js/guides/dtypes",
        ),
        Fit(
            "cpu-server",
            "ONNX Runtime decodes int4 several times faster than PyTorch decodes bfloat16",
            levels=("int4", "int8", ""),
            families=_GENERATES,
            rank=10,
            source="services/onnx_export/README.md",
        ),
        Fit(
            "cpu-server",
            "ONNX Runtime computes texts with integers for activations too",
            levels=("int8_dynamic", "int8_static", ""),
            families=_READS,
            rank=10,
            source="services/quantize/README.md",
        ),
        Fit(
            "edge",
            "onnxruntime-genai runs the folder with little memory",
            levels=("int4", "int8"),
            families=("decoder",),
            rank=10,
            settings={"packaging": ["genai"]},
            source="https://onnxruntime.ai/docs/genai/",
        ),
        Fit(
            "edge",
            "ONNX Runtime needs little memory beside the weights",
            levels=("int8_dynamic", "int8", ""),
            families=_READS,
            rank=10,
        ),
        Fit("android", "ONNX Runtime runs on Android's processors", levels=("int4", "int8_dynamic", "int8"), rank=20),
        Fit("nvidia", "ONNX Runtime's CUDA provider runs it on any NVIDIA GPU", levels=("fp16", ""), rank=20),
    ),
    usage=Usage(
        template=("slipway_onnx_export", "usage.example.j2"),
        library="onnx",
        packages="onnxruntime tokenizers numpy",
        # transformers applies a chat template with jinja2, which torch depends on and transformers does not.
        chat_packages="onnxruntime transformers jinja2 numpy",
        family_packages={
            # Translators have two vocabularies, which the file of tokenizers does not hold.
            ENCODER_DECODER.name: "onnxruntime transformers sentencepiece numpy",
            SPEECH.name: "onnxruntime transformers numpy",
            RAW_SPEECH.name: "onnxruntime transformers numpy",
        },
    ),
    media_types={".onnx": "application/vnd.onnx"},
)
