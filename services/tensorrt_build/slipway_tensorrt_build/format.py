"""The format ``tensorrt``: engines for NVIDIA GPUs, built from an ONNX graph of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from slipway.formats import (
    GRAPH_BYTES,
    Fit,
    Format,
    FormatRequest,
    LevelSettings,
    ModelSize,
    Needs,
    PlannedTask,
    Problem,
    Quantization,
    RefusedLevel,
    Requirements,
    Runtime,
    SectionRules,
    Texts,
    Usage,
    quantized,
    wrong_value,
)
from slipway.settings.sections import LARGEST, Level, Listed
from slipway_tensorrt_build.params import FITTED_TO_TEXT, LEAST_ARCHITECTURES, LEVELS, TARGET, find_unable


class DimensionRange(Listed):
    """Smallest, typical and largest value of one dynamic axis; ``[min, opt, max]`` is taken too."""

    noun: ClassVar[str] = "range"

    min: int = Field(le=LARGEST)
    opt: int = Field(le=LARGEST)
    max: int = Field(le=LARGEST)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not 0 <= self.min <= self.opt <= self.max or self.max < 1:
            remedy = "use 0 <= min <= opt <= max, for example [1, 1, 8]"
            raise wrong_value([self.min, self.opt, self.max], "is not a range", remedy)
        return self


class TensorRTConfiguration(LevelSettings):
    """A TensorRT engine.

    Attributes:
        quantization: Levels of engines: `fp16`, `bf16`, `int8_static`, `fp8_static`. Those of ``optimization.quantization`` do not count.
        builder: ``tensorrt`` (for the GPU of the machine it runs on), ``tensorrt_rtx`` (ahead of time for named targets).
        targets: GPU architectures to build for ahead of time, such as ``sm89``.
        batch: Shapes the engine is optimized for, smallest, typical and largest: rows.
        sequence: The same for new tokens per row and call.
        past: The same for tokens already in the KV cache.
        refit: Build engines whose weights can be replaced. A later export of the same base with another adapter then refits the engine that is kept on the
            worker's machine, instead of building one. Needs a worker with the GPU.
    """

    builder: Literal["auto", "tensorrt", "tensorrt_rtx"] = "auto"
    targets: Texts = ()
    batch: DimensionRange = DimensionRange(min=1, opt=1, max=8)
    sequence: DimensionRange = DimensionRange(min=1, opt=128, max=1024)
    past: DimensionRange = DimensionRange(min=0, opt=256, max=2048)
    refit: bool = False
    quantization: tuple[Level, ...] | None = ()

    @field_validator("targets")
    @classmethod
    def _check_architectures(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for target in value:
            if not TARGET.fullmatch(target):
                raise wrong_value(target, "is not a GPU architecture", "write it like sm89")
        return tuple(dict.fromkeys(value))

    @field_validator("batch", "sequence")
    @classmethod
    def _check_minimum(cls, value: DimensionRange) -> DimensionRange:
        if value.min < 1:
            raise wrong_value(str(value), "starts at 0, as only past may", "use 1 or more")
        return value


def plan(request: FormatRequest[TensorRTConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan a graph of standard operators (TensorRT parses no others), its levels, and the engines built from each."""
    graph = PlannedTask(
        id="onnx_export-tensorrt",
        stage="onnx_export",
        params={"engine": "auto", "opset": None, "runtime": "tensorrt"},
        inputs={"pytorch": request.model},
        output="onnx",
    )
    levels = tuple(replace(task, format="") for task in quantized(request, graph.reference))
    graphs = {"": graph, **dict(zip(request.levels, levels, strict=True))}
    builds = (_build(request, level, task.reference) for level, task in graphs.items())
    return (graph, *levels, *builds)


def _build(request: FormatRequest[TensorRTConfiguration], level: str, graph: str) -> PlannedTask:
    settings, ending = request.settings, f"-{level}" if level else ""
    ranges = {name: getattr(settings, name).model_dump(mode="json") for name in ("batch", "sequence", "past")}
    return PlannedTask(
        id=f"tensorrt_build{ending}",
        stage="tensorrt_build",
        params={
            "builder": settings.builder,
            "targets": list(settings.targets),
            **ranges,
            **({"refit": True} if settings.refit else {}),
        },
        inputs={"onnx": graph},
        format=f"{request.name}{ending}",
        requirements=Requirements(any_of=builders(settings.builder, settings.targets, refit=settings.refit)),
        output="tensorrt",
    )


def builders(builder: str, targets: tuple[str, ...], *, refit: bool = False) -> tuple[Needs, ...]:
    """Return what a worker needs for one builder or the other.

    TensorRT builds for the GPU it runs on. TensorRT-RTX builds for any GPU that is named, or for the worker's if none is. It builds engines that
    can be refitted only where their GPU is.
    """
    rtx = Needs(libraries=("tensorrt-rtx",), gpu=refit or not targets, gpu_architectures=targets if refit else ())
    if builder == "tensorrt_rtx":
        return (rtx,)
    on_gpu = Needs(libraries=("tensorrt",), gpu=True, gpu_architectures=targets)
    if builder == "tensorrt":
        return (on_gpu,)
    return (on_gpu, rtx) if len(targets) < 2 else (rtx,)


def conflicts(settings: TensorRTConfiguration) -> Iterable[Problem]:
    """Refuse targets for the builder that builds only for the GPU it runs on, and levels whose type a target lacks."""
    if settings.targets and settings.builder == "tensorrt":
        message = (
            f"{', '.join(settings.targets)} cannot be built by builder tensorrt, which builds for the GPU it runs on"
        )
        yield Problem("targets", message, "set formats.tensorrt.builder: tensorrt_rtx, or remove the targets")
    if settings.refit and len(settings.targets) > 1:
        message = (
            f"is true for {', '.join(settings.targets)}, and only an engine for the worker's own GPU can be refitted"
        )
        yield Problem("refit", message, "name one target, or set formats.tensorrt.refit: false")
    for level in settings.quantization or ():
        if settings.refit and level in FITTED_TO_TEXT:
            message = f"is true for {level}, whose ranges of activations belong to one merge"
            yield Problem("refit", message, "use fp16 or bf16, or set formats.tensorrt.refit: false")
        if unable := find_unable(level, settings.targets):
            message = f"{', '.join(unable)} does not compute in the type of {level}"
            remedy = f"leave the target out (sm{LEAST_ARCHITECTURES[level]} is the first that does), or use fp16"
            yield Problem("quantization", message, remedy)


def output_bytes(settings: TensorRTConfiguration, level: str, size: ModelSize) -> int:
    """Estimate an output's size for all targets."""
    each = size.at_level(level) + GRAPH_BYTES if level else size.graph_bytes
    return each * max(1, len(settings.targets))


FORMAT = Format(
    name="tensorrt",
    title="TensorRT",
    settings=TensorRTConfiguration,
    plan=plan,
    levels=LEVELS,
    quantization=Quantization(
        refused={
            "int8": RefusedLevel(
                "it multiplies integers only where those of activations are known too", instead="int8_static"
            ),
            "int8_dynamic": RefusedLevel("it finds no ranges of activations while it runs", instead="int8_static"),
            "fp8": RefusedLevel("it finds no ranges of activations while it runs", instead="fp8_static"),
            "int4": RefusedLevel("graphs of this level have operators of ONNX Runtime", instead="int8_static"),
        },
        quantizer="slipway_quantize.own_quantizers:GRAPHS_FOR_TENSORRT",
    ),
    rules=SectionRules(conflicts=conflicts, sample='{enabled: true, targets: ["sm89"]}'),
    rank=20,
    output_bytes=output_bytes,
    runtime=Runtime(
        name="tensorrt",
        files=("*.engine",),
        load="slipway_validate.runner.runtime_tensorrt:load",
        # An engine runs on GPUs only. Without one it is reported as not validated; other outputs are validated all the same.
        prefers=Needs(gpu=True),
        precision_file="engine.json",
        # float32 is multiplied in TF32, whose mantissa has 10 bits as in float16.
        rounds={"": "results/float16", "bf16": "results/bfloat16", "int8_static": "static", "fp8_static": "static"},
    ),
    usage=Usage(
        template=("slipway_tensorrt_build", "usage.example.j2"),
        library="tensorrt",
        packages="tokenizers numpy torch",
        chat_packages="transformers numpy torch",
    ),
    fits=(
        Fit(
            "nvidia",
            "an engine is the fastest form, for the GPU architecture that it was built for and no other",
            levels=("fp16", ""),
            families=("decoder",),
            rank=10,
            source="https://docs.nvidia.com/deeplearning/tensorrt/",
        ),
    ),
    media_types={".engine": "application/vnd.nvidia.tensorrt-engine"},
)
