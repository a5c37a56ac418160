"""The work of the stage: parse the ONNX graph once, build one engine per target, and describe them.

TensorRT calls a logger and a progress monitor while it builds. Their base classes belong to the chosen library (``tensorrt`` or
``tensorrt_rtx``), so the classes are defined for each build.
"""

from __future__ import annotations

import importlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipway.errors import TensorRTBuildError
from slipway.files.json_documents import read_json_object
from slipway.files.regular_file import sha256_of
from slipway.machine.shortages import GPU_MEMORY, memory_shortage_in
from slipway.model.model_files import copy_companions
from slipway.stage import Context
from slipway.texts import quoted
from slipway_tensorrt_build.builders import Choice, Machine, choose, find_machine
from slipway_tensorrt_build.kept import Refittable, Skeleton, Timings, mark_refittable, skeleton_of
from slipway_tensorrt_build.params import FITTED_TO_TEXT, LEAST_ARCHITECTURES, LEVELS, TensorRTBuildParams, find_unable
from slipway_tensorrt_build.profiles import InputProfile, describe_limited_ranges, has_cache, plan_profile, positions_of

# Warnings that concern the caller of the engine; engine.json names every input's type.
_NOTES = ("has Int64 binding",)
_LONGEST_WARNING = 500  # characters of a warning

_GRAPH, _QUANTIZATION = "model.onnx", "quantization.json"
_SHOWN = 10


def make_logger(trt: Any, ctx: Context, errors: list[str]) -> Any:
    """Return a logger that writes to the attempt's log, records warnings for the user and adds error messages to ``errors``."""
    levels = {
        trt.ILogger.Severity.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.Severity.ERROR: logging.ERROR,
        trt.ILogger.Severity.WARNING: logging.WARNING,
        trt.ILogger.Severity.INFO: logging.DEBUG,
        trt.ILogger.Severity.VERBOSE: logging.DEBUG,
    }

    class BuildLogger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._told: set[str] = set()

        def log(self, severity: Any, message: str) -> None:
            level = levels[severity]
            if level >= logging.ERROR:
                errors.append(message)
            if level == logging.WARNING:
                self._warn(f"TensorRT: {' '.join(message.split())[:_LONGEST_WARNING]}")
            else:
                ctx.log.log(level, message)

        def _warn(self, message: str) -> None:
            if any(note in message for note in _NOTES):
                ctx.log.info(message)
            elif message not in self._told:
                self._told.add(message)
                ctx.warn(message)

    return BuildLogger()


def make_monitor(trt: Any, ctx: Context, *, label: str) -> Any:
    """Return a progress monitor that reports the outermost phases and stops the build when the attempt is cancelled."""

    class BuildMonitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}
            self._outermost = ""

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._outermost = phase_name
            self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if ctx.cancelled.is_set():
                return False
            if phase_name == self._outermost:
                ctx.progress(f"build {label}", done=step + 1, total=self._steps[phase_name], unit="steps")
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return BuildMonitor()


def build_engines(source: Path, target: Path, params: TensorRTBuildParams, ctx: Context) -> None:
    """Write an engine per target, ``engine.json`` and the model's other files into the empty folder ``target``.

    Raises:
        TensorRTBuildError: With the reasons the package's README lists.
    """
    machine = find_machine()
    choice = choose(params, machine)
    level = _read_level(source)
    _require_type(level, choice)
    _require_refit(level, params)
    ctx.log.info(f"building with {choice.library} {choice.version} for {', '.join(choice.targets)}")
    trt = _import(choice)
    errors: list[str] = []
    logger = make_logger(trt, ctx, errors)
    builder = make_builder(trt, logger, errors)
    builder.max_threads = max(1, ctx.threads)
    network = builder.create_network(_network_flags(trt))
    _parse(trt, network, logger, source / _GRAPH, ctx)
    positions = positions_of(_read(source, "config.json"))
    shapes = {t.name: tuple(t.shape) for t in _inputs(network)}
    profile = plan_profile(shapes, params, positions=positions)
    if limited := describe_limited_ranges(params, positions, cached=has_cache(shapes)):
        ctx.warn(limited)
    timings = Timings(choice, machine.gpus[0] if machine.gpus else None, ctx)
    skeleton = skeleton_of(source / _GRAPH) if params.refit else None
    if skeleton is not None:
        mark_refittable(network, skeleton)
    engines, refitted = list[dict[str, Any]](), list[str]()
    for name in choice.targets:
        engine = target / f"model.{name}.engine"
        config = make_config(trt, builder, choice, name, params=params)
        refittable = None
        if skeleton is not None:
            config.set_flag(trt.BuilderFlag.REFIT_INDIVIDUAL)
            refittable = _make_refittable(
                skeleton, source, choice, machine, name=name, profile=profile, level=level, ctx=ctx
            )
        _add_profile(builder, config, profile)
        config.progress_monitor = make_monitor(trt, ctx, label=name)
        made = refittable.refit(trt, logger, errors) if refittable is not None else None
        if made is not None:
            engine.write_bytes(made)
        else:
            timings.give(config)
            errors.clear()
            build_engine(builder, network, config, engine, name=name, errors=errors, ctx=ctx)
            timings.keep(config)
        size, sha256 = engine.stat().st_size, _digest(engine, ctx)
        if refittable is not None:
            refittable.keep(engine, sha256)
        refitted += [name] if made is not None else []
        ctx.digest(engine, sha256)
        engines.append({"target": name, "file": engine.name, "size_bytes": size, "sha256": sha256})
    copy_companions(source, target)
    description = {
        "builder": choice.library,
        "builder_version": choice.version,
        "gpu": _measured_gpu(choice, machine),
        "precision": level or "float32",
        "refittable": params.refit,
        "engines": engines,
        "profiles": [{name: asdict(shapes) for name, shapes in profile.items()}],
        # Reading them from an engine would need the GPU's driver.
        "inputs": [_describe(tensor) for tensor in _inputs(network)],
        "outputs": [_describe(network.get_output(index)) for index in range(network.num_outputs)],
        "onnx": {name: _digest(source / name, ctx) for name in _graph_files(source)},
    }
    (target / "engine.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    ctx.record(
        builder=choice.library,
        builder_version=choice.version,
        precision=level or "float32",
        targets=list(choice.targets),
        timings_reused=timings.reused,
        refitted=refitted,
        size_after_bytes=sum(engine["size_bytes"] for engine in engines),
    )


def _read_level(source: Path) -> str:
    """Return the level at which the quantize stage wrote the graph; empty for float32.

    Raises:
        TensorRTBuildError: ``ONNX_INVALID``: the graph is not made for TensorRT at this level.
    """
    if not (source / _QUANTIZATION).is_file():
        return ""
    noted = _read(source, _QUANTIZATION)
    level = str(noted.get("level"))
    if noted.get("format") != "tensorrt" or level not in LEVELS:
        raise TensorRTBuildError(
            f"the graph is quantized as {quoted(noted.get('format'))} at level {quoted(level)}, which is not made for TensorRT",
            reason="ONNX_INVALID",
            remedy=f"quantize with format tensorrt, at one of {', '.join(LEVELS)}",
            about={"file": _QUANTIZATION},
        )
    return level


def _require_type(level: str, choice: Choice) -> None:
    if unable := find_unable(level, choice.targets):
        raise TensorRTBuildError(
            f"{', '.join(unable)} does not compute in the type of {level}: sm{LEAST_ARCHITECTURES[level]} is the first that does",
            reason="TENSORRT_TARGET_UNSUPPORTED",
            remedy="leave this target out, or use fp16",
            about={"level": level, "targets": ",".join(unable)},
        )


def _require_refit(level: str, params: TensorRTBuildParams) -> None:
    if params.refit and level in FITTED_TO_TEXT:
        raise TensorRTBuildError(
            f"an engine at {level} cannot be refitted: its ranges of activations belong to one merge",
            reason="UNSUPPORTED",
            remedy="use fp16 or bf16, or set refit to false",
            about={"level": level},
        )


def _make_refittable(
    skeleton: Skeleton,
    source: Path,
    choice: Choice,
    machine: Machine,
    *,
    name: str,
    profile: dict[str, InputProfile],
    level: str,
    ctx: Context,
) -> Refittable:
    known = {
        "builder": [choice.library, choice.version],
        "gpu": [machine.gpus[0].name if machine.gpus else "", name],
        "profile": {input_name: asdict(shapes) for input_name, shapes in profile.items()},
        "level": level,
    }
    return Refittable(skeleton, known, graph=source / _GRAPH, ctx=ctx)


def _measured_gpu(choice: Choice, machine: Machine) -> str | None:
    """Return the name of the GPU whose kernels were measured; None for engines built ahead of time."""
    return machine.gpus[0].name if choice.library == "tensorrt" and machine.gpus else None


def _inputs(network: Any) -> list[Any]:
    return [network.get_input(index) for index in range(network.num_inputs)]


def make_builder(trt: Any, logger: Any, errors: list[str]) -> Any:
    """Return the library's builder. ``errors`` is what the logger has recorded: the exception of a builder that does not start says nothing.

    Raises:
        TensorRTBuildError: ``GPU_OUT_OF_MEMORY``: not even CUDA's own memory is free on the GPU; ``UNSUPPORTED``: it does not start.
    """
    try:
        return trt.Builder(logger)
    except (TypeError, RuntimeError) as error:  # what its binding raises
        detail = _shown(errors) or str(error)
        if memory_shortage_in(detail) is GPU_MEMORY:
            message = f"the GPU has too little free memory for TensorRT to start: {detail}"
            raise TensorRTBuildError(message, reason=GPU_MEMORY.reason, remedy=GPU_MEMORY.remedy) from error
        raise TensorRTBuildError(
            f"TensorRT does not start: {detail}",
            reason="UNSUPPORTED",
            remedy="see with nvidia-smi whether the driver responds and is new enough for this TensorRT",
        ) from error


def _shown(errors: list[str]) -> str:
    return "; ".join(" ".join(message.split()) for message in errors[:_SHOWN])


def _import(choice: Choice) -> Any:
    try:
        return importlib.import_module(choice.library)
    except (ImportError, OSError) as error:
        raise TensorRTBuildError(
            f"{choice.library} {choice.version} is installed but cannot be loaded ({error})",
            reason="UNSUPPORTED",
            remedy="its libraries need x86-64 Linux and, for tensorrt, the NVIDIA driver: reinstall it",
            about={"builder": choice.library},
        ) from error


def _network_flags(trt: Any) -> int:
    """Return the flag for strongly typed networks, which take every precision from the graph; newer versions have no other kind."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _parse(trt: Any, network: Any, logger: Any, graph: Path, ctx: Context) -> None:
    if not graph.is_file():
        raise TensorRTBuildError(
            f"the folder has no {_GRAPH}", reason="ONNX_INVALID", remedy="give the folder that onnx_export wrote"
        )
    ctx.progress("parse", done=0, total=1, unit="graphs")
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(graph))
    problems = [_problem(parser.get_error(index)) for index in range(parser.num_errors)]
    if parsed and not problems:
        return
    operators = sorted({operator for _, operator, _ in problems if operator})
    shown = "; ".join(f"{operator or 'graph'} {node!r}: {text}" for node, operator, text in problems[:_SHOWN])
    raise TensorRTBuildError(
        f"TensorRT cannot parse {_GRAPH}: {shown or 'it gives no reason'}",
        reason="TENSORRT_PARSE_FAILED",
        remedy="export with runtime tensorrt (standard operators, opset 20)",
        about={"operators": ",".join(operators), "nodes": ",".join(node for node, _, _ in problems if node)},
    )


def _problem(error: Any) -> tuple[str, str, str]:
    """Return the node name, operator and description of a parser error."""
    return error.node_name() or "", error.node_operator() or "", " ".join(error.desc().split())


def make_config(trt: Any, builder: Any, choice: Choice, target: str, *, params: TensorRTBuildParams) -> Any:
    """Return the builder's configuration for a target, with the workspace that the parameters allow."""
    config = builder.create_builder_config()
    if choice.library == "tensorrt_rtx":
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), 0)
    if params.workspace_bytes:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, params.workspace_bytes)
    return config


def _add_profile(builder: Any, config: Any, profile: dict[str, InputProfile]) -> None:
    made = builder.create_optimization_profile()
    for name, shapes in profile.items():
        made.set_shape(name, shapes.min, shapes.opt, shapes.max)
    if config.add_optimization_profile(made) < 0:
        raise TensorRTBuildError(
            f"TensorRT refuses the optimization profile {profile}",
            remedy="check the ranges of batch, sequence and past",
        )


def build_engine(
    builder: Any, network: Any, config: Any, engine: Path, *, name: str, errors: list[str], ctx: Context
) -> None:
    """Build an engine for the target ``name`` and write it to the file ``engine``. ``errors`` is what the builder logs meanwhile.

    Raises:
        TensorRTBuildError: ``GPU_OUT_OF_MEMORY``: too little of the GPU's memory was free to try kernels;
            ``TENSORRT_BUILD_FAILED``: there is no engine for another reason.
    """
    serialized = builder.build_serialized_network(network, config)
    ctx.check_cancelled()
    if serialized is None:
        detail = _shown(errors) or "it gives no reason"
        # No kernel is found where none could be tried, so this is asked first.
        if memory_shortage_in(detail) is GPU_MEMORY:
            raise TensorRTBuildError(
                f"the GPU has too little free memory to build an engine for {name}: {detail}",
                reason=GPU_MEMORY.reason,
                remedy=GPU_MEMORY.remedy,
                about={"target": name},
            )
        raise TensorRTBuildError(
            f"TensorRT cannot build an engine for {name}: {detail}",
            remedy="see the attempt's log; an older architecture may lack kernels for float32, and newer ONNX opsets "
            "bring operators without kernels: try an fp16 graph, another target, or opset 20",
            about={"target": name},
        )
    with engine.open("wb") as file:
        file.write(serialized)


def _describe(tensor: Any) -> dict[str, Any]:
    """Return the name, type and declared shape (-1 where dynamic) of an input or output of the network."""
    return {"name": tensor.name, "dtype": tensor.dtype.name.lower(), "shape": list(tensor.shape)}


def _read(source: Path, name: str) -> dict[str, Any]:
    try:
        return read_json_object(source / name, lenient=True)
    except (OSError, ValueError) as error:
        raise TensorRTBuildError(
            f"{name} cannot be read ({error})",
            reason="ONNX_INVALID",
            remedy="give the folder that onnx_export or quantize wrote",
            about={"file": name},
        ) from error


def _graph_files(source: Path) -> list[str]:
    return sorted(path.name for pattern in ("*.onnx", "*.data") for path in source.glob(pattern))


def _digest(path: Path, ctx: Context) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    ctx.check_cancelled()
    return sha256_of(path)
