"""Translate what the tracers raise into typed errors that name the operator, the axis or the line of code at fault."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slipway.errors import ModelExportError, ONNXExportError, UnorderedMapError
from slipway.machine.shortages import is_out_of_memory
from slipway_onnx_export.interface import Port
from slipway_onnx_export.source import ModelSource

_TORCH = Path(torch.__file__).parent
_OURS = Path(__file__).parent.parent

AXIS, DATA = "axis", "data"
OPTIMIZATION = "optimization"

_FIXED_AXIS = re.compile(r"inferred a static shape of (\d+) for dimension inputs\S*?(?:\[(\d+)\])?\.shape\[(\d+)\]")
_CONSTRAINT = re.compile(
    r"Constraints violated|Not all values of|specialized it to be a constant|specialization of value", re.I
)
_DATA_DEPENDENT = re.compile(r"data-dependent|Dynamic control flow is not supported", re.I)
_MISSING_FUNCTION = re.compile(r"No ONNX function found for <OpOverload\(op='([^']+)'")
_MISSING_SYMBOL = re.compile(r"Exporting the operator '([^']+)' to ONNX opset version (\d+) is not supported")
_SINCE = re.compile(r"added in version (\d+)")


@contextmanager
def translate_engine_errors(source: ModelSource, *, engine: str, phase: str = "") -> Iterator[None]:
    """Translate an engine's untyped exceptions in this block. A lack of memory and errors of files pass as they are.

    Args:
        source: The model.
        engine: The engine's name.
        phase: What the block does, for rules of recovery; empty for the engine's work as a whole.

    Raises:
        ONNXExportError: ``EXPORT_ENGINE_FAILED``.
    """
    try:
        yield
    except (ModelExportError, OSError):
        raise
    except Exception as error:  # libraries let any exception of their own code through
        if is_out_of_memory(error):
            raise
        raise ONNXExportError(
            f"engine {engine} failed on {source.architecture}"
            f"{phase and f' in its {phase}'}: {type(error).__name__}: {_first_line(str(error))}",
            reason="EXPORT_ENGINE_FAILED",
            remedy="use optimization none" if phase == OPTIMIZATION else "use another engine",
            about={**_describe_attempt(source, engine, error), **_place(error)} | ({"phase": phase} if phase else {}),
        ) from error


def translate_capture_error(
    source: ModelSource, error: Exception, *, attention: str, ports: Sequence[Port] = ()
) -> ONNXExportError:
    """Translate an exception of torch.export or of its conversion to ONNX; ``ports`` are the inputs that were traced.

    Raises:
        Exception: The exception itself, if memory ran out: no other engine helps.
    """
    if is_out_of_memory(error):
        raise error
    about = {**_describe_attempt(source, "dynamo", error), "attention": attention, **_place(error)}
    texts = [str(one) for one in _causes(error)]
    cause = texts[-1]
    for text in texts:
        if match := _MISSING_FUNCTION.search(text):
            return _operator_error(match[1], f"torch.onnx {torch.__version__}", about)
    if match := _FIXED_AXIS.search(cause):
        axis = _describe_axis(ports, int(match[2] or 0), int(match[3]))
        about |= {"kind": AXIS, "axis": axis, "size": match[1]}
        return _shape_error(f"{axis} would be fixed to {match[1]}", about)
    if _DATA_DEPENDENT.search(cause) or type(error.__cause__).__name__ == "GuardOnDataDependentSymNode":
        return _shape_error(f"the model's code branches on computed values{_place_text(about)}", about | {"kind": DATA})
    if _CONSTRAINT.search(cause):
        return _shape_error(f"an axis would be fixed{_place_text(about)}: {_first_line(cause)}", about | {"kind": AXIS})
    return ONNXExportError(
        f"torch {torch.__version__} could not trace {source.architecture}: {_first_line(cause) or type(error).__name__}",
        reason="EXPORT_ENGINE_FAILED",
        remedy="use engine legacy",
        about=about,
    )


def translate_tracer_error(source: ModelSource, error: Exception, *, attention: str) -> ONNXExportError:
    """Translate an exception of the TorchScript exporter.

    Raises:
        Exception: The exception itself, if memory ran out: no other engine helps.
    """
    if is_out_of_memory(error):
        raise error
    about = {**_describe_attempt(source, "legacy", error), "attention": attention, **_place(error)}
    text = str(error)
    if "unordered_map" in text:  # libstdc++ says unordered_map::at, others "invalid unordered_map<K, T> key"
        return UnorderedMapError(
            f"the legacy tracer lost a value of {source.architecture}: {_first_line(text)}",
            remedy="use engine dynamo with opset 18 or later",
            about=about,
        )
    if match := _MISSING_SYMBOL.search(text):
        since = _SINCE.search(text)
        return _operator_error(match[1], f"opset {match[2]} of the legacy tracer", about, since[1] if since else "")
    return ONNXExportError(
        f"the legacy tracer of torch {torch.__version__} failed on {source.architecture}: "
        f"{_first_line(text) or type(error).__name__}",
        reason="EXPORT_ENGINE_FAILED",
        remedy="use engine dynamo with opset 18 or later",
        about=about,
    )


def _describe_axis(ports: Sequence[Port], index: int, axis: int) -> str:
    """Describe an axis of the traced inputs."""
    if index >= len(ports) or axis >= len(ports[index].shape):
        return f"axis {axis} of input {index}"
    return f"axis {axis} of {ports[index].name} ({ports[index].shape[axis]})"


def _describe_attempt(source: ModelSource, engine: str, error: Exception) -> dict[str, Any]:
    return {"engine": engine, "architecture": source.architecture, "cause": type(error).__name__}


def _operator_error(operator: str, where: str, about: dict[str, Any], since: str = "") -> ONNXExportError:
    later = f"; opset {since} has it" if since else ""
    return ONNXExportError(
        f"{about['architecture']} uses the operator {operator}, which {where} cannot write{later}",
        reason="OPERATOR_UNSUPPORTED",
        remedy=f"use opset {since}" if since else "use another engine",
        about=about | {"operator": operator} | ({"since": since} if since else {}),
    )


def _shape_error(what: str, about: dict[str, Any]) -> ONNXExportError:
    return ONNXExportError(
        f"torch.export cannot trace {about['architecture']} with varying shapes: {what}",
        reason="DYNAMIC_SHAPE",
        remedy="use attention eager, engine legacy or static shapes",
        about=about,
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it, the innermost last."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__


def _place(error: BaseException) -> dict[str, Any]:
    """Return file, line and code of the model at which an error arose; empty if it arose outside of the model's code."""
    for cause in reversed(list(_causes(error))):
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            path = Path(frame.filename)
            if path.suffix == ".py" and not path.is_relative_to(_TORCH) and not path.is_relative_to(_OURS):
                return {"file": path.name, "line": frame.lineno, "code": frame.line or ""}
    return {}


def _place_text(about: dict[str, Any]) -> str:
    return f" at {about['file']}:{about['line']}" if "file" in about else ""


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0]
