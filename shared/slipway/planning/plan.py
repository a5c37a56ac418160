"""From a configuration to the graph of tasks that carries it out. Pure: no store, no clock, no environment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from slipway.configuration import ExportConfiguration
from slipway.errors import ServiceError
from slipway.models.base_format import METHODS, is_base_format
from slipway.planning.matching import ANY, Needs, Requirements
from slipway.planning.references import Output, Source
from slipway.stage_call import StageCall
from slipway.texts import quoted

REQUIRED_SOURCES = ("adapter", "base")
OPTIONAL_SOURCES = ("heldout",)

VALIDATION = "validation"
"""Format name of the validation artifact."""


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """One run of one stage.

    Attributes:
        id: Unique within the export.
        stage: Name of the stage.
        params: Parameters for the stage's model; what is not named takes its default there.
        inputs: Where each input comes from, by input name: ``source:NAME`` or ``task:ID/OUTPUT``.
        format: Format the task delivers; empty for an intermediate result.
        partial: Whether the task runs over those of its task inputs that succeeded, instead of needing them all.
        requirements: Which workers it is for.
        output: Name of the one output that it gives.
    """

    id: str
    stage: str
    params: Mapping[str, Any]
    inputs: Mapping[str, str]
    format: str = ""
    partial: bool = False
    requirements: Requirements = ANY
    output: str = ""

    @property
    def call(self) -> StageCall:
        """What it runs."""
        return StageCall(self.stage, self.params, self.inputs)


@dataclass
class _Graph:
    """Tasks in an order in which they can run."""

    tasks: list[PlannedTask] = field(default_factory=list)

    def add(
        self,
        task_id: str,
        stage: str,
        *,
        params: Mapping[str, Any],
        inputs: Mapping[str, str],
        format: str = "",  # noqa: A002 - the field's name everywhere
        partial: bool = False,
        requirements: Requirements = ANY,
        output: str,
    ) -> str:
        """Append a task; returns the reference to its output."""
        task = PlannedTask(task_id, stage, dict(params), dict(inputs), format, partial, requirements, output)
        self.tasks.append(task)
        return str(Output(task_id, output))


def plan(
    configuration: ExportConfiguration,
    source_names: Collection[str],
    *,
    source_formats: Mapping[str, str] = MappingProxyType({}),
) -> tuple[PlannedTask, ...]:
    """Tasks of an export, each after those whose outputs it takes.

    Args:
        configuration: What the export shall do; only what it asks for is planned.
        source_names: Names of the artifacts the export starts from: ``base``, ``adapter``, perhaps ``heldout``, and ``adapter-02``
            and so on for each of ``combination.adapters``.
        source_formats: How sources are stored that are not plain 16- or 32-bit safetensors, by name (``slipway.models.base_format``).

    Raises:
        ServiceError: reason ``REQUEST_INVALID`` when a source is missing, or one that no task takes is there.
    """
    more = more_adapters(configuration)
    _check_sources({*REQUIRED_SOURCES, *OPTIONAL_SOURCES, *more}, source_names)
    check_formats(source_names, source_formats)
    missing = [name for name in (*REQUIRED_SOURCES, *more) if name not in source_names]
    if missing:
        raise ServiceError(
            f"sources lacks {', '.join(missing)}",
            reason="REQUEST_INVALID",
            remedy="push the folder and name its digest",
        )
    graph = _Graph()
    adapter = _adapter(graph, configuration, more)
    base = _base(graph, configuration, source_formats.get("base", ""))
    merged = _merge(graph, configuration, base=base, adapter=adapter)
    _pytorch_levels(graph, configuration, merged)
    _onnx(graph, configuration, merged)
    _tensorrt(graph, configuration, merged)
    if configuration.validation.enabled:
        _validate(graph, configuration, source_names, base=base, adapter=adapter)
    return tuple(graph.tasks)


def _check_sources(known: Collection[str], names: Collection[str]) -> None:
    """Refuse sources that no task takes."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ServiceError(
            f"sources has {quoted(unknown[0])}, which this configuration does not take",
            reason="REQUEST_INVALID",
            remedy=f"it takes {', '.join(sorted(known))}",
            about={"field": "sources"},
        )


def check_formats(names: Collection[str], formats: Mapping[str, str]) -> None:
    """Refuse formats of no source, given its names, or of no kind.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``.
    """
    for name, stored_as in sorted(formats.items()):
        if name not in names:
            what, remedy = f"source_formats has {quoted(name)}, which is no source", "name one of sources"
        elif stored_as and not is_base_format(stored_as):
            what, remedy = f"source_formats[{name}] is {quoted(stored_as)}", f"use pickle, {', '.join(METHODS)}"
        else:
            continue
        raise ServiceError(what, reason="REQUEST_INVALID", remedy=remedy, about={"field": "source_formats"})


def more_adapters(configuration: ExportConfiguration) -> tuple[str, ...]:
    """Source names of the adapters that join the checkpoint's, in the order of the configuration."""
    return tuple(f"adapter-{number:02}" for number, _ in enumerate(configuration.combination.adapters, 2))


def _adapter(graph: _Graph, configuration: ExportConfiguration, more: tuple[str, ...]) -> str:
    """The one adapter that is merged and that outputs are compared with."""
    if not more:
        return str(Source("adapter"))
    combination = configuration.combination
    return graph.add(
        "combine",
        "combine",
        params={
            "weights": list(combination.weights),
            "combination_type": combination.type,
            "density": combination.density,
            "majority_sign_method": combination.majority_sign,
            "seed": combination.seed,
        },
        inputs={name: str(Source(name)) for name in ("adapter", *more)},
        output="adapter",
    )


def _base(graph: _Graph, configuration: ExportConfiguration, stored_as: str) -> str:
    """The base that the adapter is merged into and that outputs are compared with: prepared only where it has to be."""
    merge_onto = configuration.base_model.merge_onto
    if not stored_as and merge_onto == "original":
        return str(Source("base"))
    return graph.add(
        "prepare", "prepare", params={"merge_onto": merge_onto}, inputs={"base": str(Source("base"))}, output="base"
    )


def _merge(graph: _Graph, configuration: ExportConfiguration, *, base: str, adapter: str) -> str:
    pytorch = configuration.formats.pytorch
    # Later formats take their tokenizer from the merged model, so it is left out only where nothing else is made.
    others = configuration.formats.onnx.enabled or configuration.formats.tensorrt.enabled
    return graph.add(
        "merge",
        "merge",
        params={
            "save_tokenizer": pytorch.save_tokenizer or others,
            # Validation loads the merged model and compares it with base and adapter, on text instead of random tokens. The
            # same without one: the merge is shared with exports that have it.
            "verify": "spot",
        },
        inputs={"base": base, "adapter": adapter},
        format="pytorch" if pytorch.enabled else "",
        output="pytorch",
    )


def _quantize(graph: _Graph, configuration: ExportConfiguration, format_name: str, *, level: str, source: str) -> None:
    optimization = configuration.optimization
    graph.add(
        f"quantize-{format_name}-{level}",
        "quantize",
        params={
            "format": format_name,
            "level": level,
            "group_size": optimization.group_size,
            "packed": optimization.compress_weights,
        },
        inputs={"model": source},
        format=f"{format_name}-{level}",
        output="model",
    )


def _pytorch_levels(graph: _Graph, configuration: ExportConfiguration, merged: str) -> None:
    if configuration.formats.pytorch.enabled:
        for level in configuration.levels("pytorch"):
            _quantize(graph, configuration, "pytorch", level=level, source=merged)


def _onnx(graph: _Graph, configuration: ExportConfiguration, merged: str) -> None:
    onnx = configuration.formats.onnx
    if not onnx.enabled:
        return
    exported = graph.add(
        "onnx_export",
        "onnx_export",
        params={
            "engine": "mobius",
            "opset": onnx.opset_version or None,
            "dynamic_axes": onnx.dynamic_axes,
            "optimize_graph": onnx.optimize_graph,
        },
        inputs={"pytorch": merged},
        format="onnx",
        output="onnx",
    )
    for level in configuration.levels("onnx"):
        _quantize(graph, configuration, "onnx", level=level, source=exported)


def _tensorrt(graph: _Graph, configuration: ExportConfiguration, merged: str) -> None:
    tensorrt = configuration.formats.tensorrt
    if not tensorrt.enabled:
        return
    # TensorRT parses standard operators only, so its graph is not the one ONNX Runtime gets.
    exported = graph.add(
        "onnx_export-tensorrt",
        "onnx_export",
        params={"engine": "mobius", "opset": None, "runtime": "tensorrt"},
        inputs={"pytorch": merged},
        output="onnx",
    )
    ranges = {name: getattr(tensorrt, name).model_dump(mode="json") for name in ("batch", "sequence", "past")}
    graph.add(
        "tensorrt_build",
        "tensorrt_build",
        params={"builder": tensorrt.builder, "targets": list(tensorrt.targets), **ranges},
        inputs={"onnx": exported},
        format="tensorrt",
        requirements=Requirements(any_of=builders(tensorrt.builder, tensorrt.targets)),
        output="tensorrt",
    )


def builders(builder: str, targets: tuple[str, ...]) -> tuple[Needs, ...]:
    """What a worker has to have for one builder or the other.

    TensorRT builds for the GPU it runs on. TensorRT-RTX builds for any that is named, and takes the one that is there if none is.
    """
    rtx = Needs(libraries=("tensorrt-rtx",), gpu=not targets)
    if builder == "tensorrt_rtx":
        return (rtx,)
    on_gpu = Needs(libraries=("tensorrt",), gpu=True, gpu_architectures=targets)
    if builder == "tensorrt":
        return (on_gpu,)
    return (on_gpu, rtx) if len(targets) < 2 else (rtx,)


def _validate(
    graph: _Graph, configuration: ExportConfiguration, source_names: Collection[str], *, base: str, adapter: str
) -> None:
    validation = configuration.validation
    inputs = {"base": base, "adapter": adapter}
    inputs |= {name: str(Source(name)) for name in ("heldout",) if name in source_names}
    outputs = {"merge": "pytorch", "onnx_export": "onnx", "tensorrt_build": "tensorrt", "quantize": "model"}
    inputs |= {task.format: str(Output(task.id, outputs[task.stage])) for task in graph.tasks if task.format}
    graph.add(
        "validate",
        "validate",
        params={
            "test_samples": validation.test_samples,
            "compare_outputs": validation.compare_outputs,
            "benchmark_performance": validation.benchmark_performance,
            "limits": {level: row.model_dump(exclude_none=True) for level, row in sorted(validation.limits.items())},
        },
        inputs=inputs,
        format=VALIDATION,
        partial=True,
        # An engine runs nowhere else; what cannot be run is reported as not validated, the rest is validated all the same.
        requirements=Requirements(prefers=(Needs(gpu=True),) if configuration.formats.tensorrt.enabled else ()),
        output=VALIDATION,
    )
