"""Make TorchScript: trace a module, compile the parts whose control flow a trace would lose, freeze it, and save it."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from slipway.errors import TorchGraphError
from slipway.model.graphs.branches import MASKING, Branch, harmful_branches
from slipway_torchscript.interface import Tensors

_LONGEST_MESSAGE = 400


def trace_module(module: torch.nn.Module, sample: Tensors, *, control_flow: str) -> tuple[Any, list[Branch]]:
    """Trace a module to TorchScript; return it with the branches of its code that depend on the sample.

    Args:
        module: The module.
        sample: Inputs of one call.
        control_flow: ``trace`` refuses a trace that depends on its sample. ``script`` compiles the modules that branch and traces the
            rest. ``prove`` keeps the trace unless it depends on computed values: comparisons at other shapes cannot try all of those.

    Raises:
        TorchGraphError: ``TRACER_WARNING``, ``TORCHSCRIPT_UNSCRIPTABLE`` (a module that branches cannot be compiled), ``TORCH_GRAPH_FAILED``.
    """
    script, branches = _trace(module, sample)
    if branches and control_flow == "script":
        module = script_branching(module, branches)
        if isinstance(module, torch.jit.ScriptModule):  # the outermost module branches, so all of it is compiled
            return module, []
        script, branches = _trace(module, sample)
    lost = branches if control_flow != "prove" else _value_branches(module, sample, branches)
    if lost:
        raise lost_branch_error(lost)
    return script, branches


class _Readings(TorchFunctionMode):
    """Records where Python reads a tensor's value. Outside a tracer, sizes are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[tuple[str, int]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__bool__, torch.Tensor.item):
            frame = sys._getframe(1)
            self.places.add((frame.f_code.co_filename, frame.f_lineno))
        return func(*args, **(kwargs or {}))


def _value_branches(module: torch.nn.Module, sample: Tensors, branches: Sequence[Branch]) -> list[Branch]:
    """Return the branches that depend on values, except those on masks: the comparison runs calls with and without padding."""
    relevant = [branch for branch in branches if branch.kind != MASKING]
    if not relevant:
        return []
    with _Readings() as read, torch.no_grad():
        module(*sample)
    return [branch for branch in relevant if (str(branch.path), branch.line) in read.places]


def _trace(module: torch.nn.Module, sample: Tensors) -> tuple[Any, list[Branch]]:
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        try:
            # Not strict: keys and values are lists. Not checked: the comparison at other shapes does more.
            script = torch.jit.trace(module, sample, strict=False, check_trace=False)
        except Exception as error:  # the tracer lets any exception of the model's or its own code through
            raise graph_error(module, "trace", error) from error
    return script, harmful_branches(caught)


def script_branching(module: torch.nn.Module, branches: Sequence[Branch]) -> torch.nn.Module:
    """Compile the submodules whose code branches, in place; return the module, compiled if it branches itself.

    Raises:
        TorchGraphError: ``TORCHSCRIPT_UNSCRIPTABLE`` if a branch is outside all submodules, or one cannot be compiled.
    """
    for branch in branches:
        owners = [name for name, each in module.named_modules() if _has_line(each, branch)]
        if not owners:
            raise _unscriptable_error(branch, "it is not in the forward of a module")
        for name in owners:
            try:
                compiled = torch.jit.script(module.get_submodule(name))
            except Exception as error:  # the compiler raises errors of many classes for Python that it does not support
                said = " ".join(str(error).split())[:_LONGEST_MESSAGE]
                raise _unscriptable_error(
                    branch, f"torch.jit.script cannot compile {name or type(module).__name__}: {said}"
                ) from error
            if not name:
                return compiled
            module.set_submodule(name, compiled)
    return module


def _has_line(module: torch.nn.Module, branch: Branch) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    try:
        forward = inspect.unwrap(type(module).forward)
        lines, first = inspect.getsourcelines(forward)
        path = inspect.getsourcefile(forward)
    except (OSError, TypeError):
        return False
    return path is not None and Path(path) == branch.path and first <= branch.line < first + len(lines)


def freeze_script(script: Any, *, optimize: bool) -> Any:
    """Freeze a script, so that its weights are constants; with ``optimize``, also rewrite it for inference on CPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.freeze(script.eval())
        return torch.jit.optimize_for_inference(script) if optimize else script


def save(script: Any, path: Path) -> None:
    """Write a script's file.

    Raises:
        TorchGraphError: ``TORCH_GRAPH_FAILED`` if torch cannot store a layout of its weights.
    """
    try:
        script.save(str(path))
    except RuntimeError as error:
        raise graph_error(script, "save", error) from error


def lost_branch_error(branches: Sequence[Branch]) -> TorchGraphError:
    """Return the error that refuses a trace because of the first of these branches."""
    first = branches[0]
    return TorchGraphError(
        f"the trace would lose a branch at {first.file}:{first.line}: {first.code} ({first.message})",
        reason="TRACER_WARNING",
        remedy="use torch.export or ONNX for this model, and leave TorchScript out",
        about={**_place(first), "places": "\n".join(map(str, branches))},
    )


def graph_error(module: object, step: str, error: Exception) -> TorchGraphError:
    """Return the error for a step that failed in torch."""
    said = " ".join((str(error).strip() or type(error).__name__).split())[:_LONGEST_MESSAGE]
    inner = getattr(module, "model", module)
    return TorchGraphError(
        f"torch {torch.__version__} cannot {step} {type(inner).__name__}: {type(error).__name__}: {said}",
        reason="TORCH_GRAPH_FAILED",
        remedy="leave this format out for this model",
        about={"architecture": type(inner).__name__, "step": step},
    )


def _unscriptable_error(branch: Branch, why: str) -> TorchGraphError:
    return TorchGraphError(
        f"the branch at {branch.file}:{branch.line} cannot be kept: {why}",
        reason="TORCHSCRIPT_UNSCRIPTABLE",
        remedy="use torch.export or ONNX for this model, and leave TorchScript out",
        about=_place(branch),
    )


def _place(branch: Branch) -> dict[str, object]:
    return {"kind": branch.kind, "file": branch.file, "line": branch.line, "code": branch.code}
