"""The work of the stages: load, compute expected results, capture, write, and compare call by call."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipway.errors import TorchGraphError
from slipway.model.families import FEATURE_EXTRACTION
from slipway.model.folder import ModelFolder
from slipway.model.pytorch.text_model import TextModel, describe_program, file_digest
from slipway.model.pytorch.traced_rotary import compute_frequencies_in_graph
from slipway.proof.comparison import (
    DIFFERENCE_LIMITS,
    Case,
    Difference,
    cases,
    difference,
    first_unproven_length,
    largest_difference,
    sample_case,
)
from slipway.stage import Context
from slipway_torchscript import capture, tracing
from slipway_torchscript.interface import LONGEST_PROOF, Interface, Tensors, interface_of, open_source
from slipway_torchscript.params import (
    COMPILED,
    DESCRIPTIONS,
    LEVELS,
    PROGRAM,
    SCRIPT,
    TorchExportParams,
    TorchScriptParams,
)

LIBRARIES = ("torch", "transformers")
_STEPS = 5

Run = Callable[..., Any]


def export_torchscript(folder: Path, target: Path, params: TorchScriptParams, ctx: Context) -> None:
    """Write ``model.pt``, ``torchscript.json`` and the model's other files into the empty folder ``target``.

    Raises:
        TorchGraphError: With the reasons that the README lists.
    """
    source, interface, expected = _prepare(folder, params, ctx)
    example = interface.feeds(sample_case(cached=bool(interface.cache), one_row=interface.one_row))
    ctx.progress("tracing", done=2, total=_STEPS, unit="steps")
    script, branches = tracing.trace_module(interface.module, example, control_flow=params.control_flow)
    if branches and (
        tokens := first_unproven_length(positions=source.most, thresholds=source.thresholds, longest=LONGEST_PROOF)
    ):
        error = tracing.lost_branch_error(branches)
        raise TorchGraphError(
            f"{error.message}; beyond {tokens} tokens, where it decides otherwise, nothing is compared",
            reason="TRACER_WARNING",
            remedy=error.remedy,
            about={**error.about, "tokens": tokens},
        )
    facts = _facts(source, interface) | {
        "control_flow": params.control_flow if branches or params.control_flow == "script" else "trace",
        "proven_branches": list(map(str, branches)),
        "optimized": params.optimize,
    }
    script = tracing.freeze_script(script, optimize=params.optimize)
    ctx.progress("writing", done=3, total=_STEPS, unit="steps")
    tracing.save(script, target / SCRIPT)
    per_token, dtype = interface.per_token, interface.dtype
    opened = source.folder
    del source, interface, script, example  # free the model before the written graph is loaded
    ctx.progress("comparing", done=4, total=_STEPS, unit="steps")
    differences = compare_graph(torch.jit.load(str(target / SCRIPT)), expected, per_token=per_token, dtype=dtype)
    _finish(opened, target, facts | {"differences": differences}, (SCRIPT,), ctx)


def export_program(folder: Path, target: Path, params: TorchExportParams, ctx: Context) -> None:
    """Write ``model.pt2``, ``torch_export.json`` and the model's other files into the empty folder ``target``.

    Raises:
        TorchGraphError: With the reasons that the README lists.
    """
    source, interface, expected = _prepare(folder, params, ctx)
    example = interface.feeds(sample_case(cached=bool(interface.cache), one_row=interface.one_row))
    ctx.progress("capturing", done=2, total=_STEPS, unit="steps")
    program = capture.capture_module(interface, example, source.most)
    facts = _facts(source, interface)
    per_token, dtype = interface.per_token, interface.dtype
    opened = source.folder
    del source, interface, example
    ctx.progress("writing", done=3, total=_STEPS, unit="steps")
    capture.save(program, target / PROGRAM)
    files = [PROGRAM]
    if params.aot and (by := _compile(program, target, ctx)):
        facts["compiled_by"] = by
        files.append(COMPILED)
    del program
    ctx.progress("comparing", done=4, total=_STEPS, unit="steps")
    run = torch.export.load(target / PROGRAM).module()
    facts["differences"] = compare_graph(run, expected, per_token=per_token, dtype=dtype)
    if COMPILED in files:
        package = torch._inductor.aoti_load_package(str(target / COMPILED))
        facts["compiled_differences"] = compare_graph(package, expected, per_token=per_token, dtype=dtype)
    _finish(opened, target, facts, tuple(files), ctx)


def _prepare(
    folder: Path, params: TorchScriptParams | TorchExportParams, ctx: Context
) -> tuple[TextModel, Interface, list[Expected]]:
    """Load the model and compute its results for every case, before anything changes it."""
    torch.set_num_threads(ctx.threads)
    ctx.progress("loading", done=0, total=_STEPS, unit="steps")
    title = "TorchScript" if isinstance(params, TorchScriptParams) else "torch.export"
    dtype = getattr(torch, LEVELS.get(params.level, "float32"))
    source = open_source(folder, title=title, dtype=dtype, attention=params.attention)
    pooling = source.pooling("graph", ctx) if source.family is FEATURE_EXTRACTION else None
    interface = interface_of(source, pooling)
    ctx.progress("computing", done=1, total=_STEPS, unit="steps")
    calls = cases(
        cached=bool(interface.cache),
        one_row=interface.one_row,
        positions=source.most,
        thresholds=source.thresholds,
        longest=LONGEST_PROOF,
    )
    expected = compute_expected(interface, calls)
    compute_frequencies_in_graph(source.model)
    return source, interface, expected


def _compile(program: Any, target: Path, ctx: Context) -> str:
    """Compile the program; return the compiler's path, or an empty string if there is no compiler."""
    compiler = capture.compiler()
    if not compiler:
        ctx.warn(
            f"{COMPILED} is not delivered: AOTInductor needs a C++ compiler ({', '.join(capture.COMPILERS)}), and this worker has none"
        )
        return ""
    scratch = ctx.workdir / "inductor"
    try:
        capture.compile_ahead(program, target / COMPILED, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return compiler


def _facts(source: TextModel, interface: Interface) -> dict[str, Any]:
    return {
        "precision": str(interface.dtype).removeprefix("torch."),
        "inputs": list(interface.inputs),
        "outputs": list(interface.outputs),
        "cache": [list(each) for each in interface.cache],
        "max_length": source.most,
        "one_row": interface.one_row,
        "attention": source.model.config._attn_implementation,
    }


def _finish(folder: ModelFolder, target: Path, facts: dict[str, Any], files: tuple[str, ...], ctx: Context) -> None:
    """Copy the model's other files, and describe the graph."""
    digests = {
        name: {"size_bytes": (target / name).stat().st_size, "sha256": file_digest(target / name, ctx)}
        for name in files
    }
    describe_program(folder, target, DESCRIPTIONS[files[0]], {**facts, "files": digests}, libraries=LIBRARIES, ctx=ctx)


@dataclass(frozen=True)
class Expected:
    """A call, and PyTorch's results for it.

    Attributes:
        case: The shape.
        feeds: The inputs.
        results: The outputs by name. Only results at tokens count, not at padding.
    """

    case: Case
    feeds: Tensors
    results: dict[str, Any]


@torch.no_grad()
def compute_expected(interface: Interface, shapes: Iterable[Case]) -> list[Expected]:
    """Compute the module's results for every case."""
    expected = []
    for case in shapes:
        feeds = interface.feeds(case)
        expected.append(Expected(case, feeds, dict(zip(interface.outputs, interface.module(*feeds), strict=True))))
    return expected


@torch.no_grad()
def compare_graph(
    run: Run, expected: list[Expected], *, per_token: frozenset[str], dtype: torch.dtype
) -> dict[str, float]:
    """Run a graph on every case; return its largest difference from PyTorch by case.

    Raises:
        TorchGraphError: ``EXPORT_PARITY_FAILED`` for the first case that differs or that the graph cannot run.
    """
    allowed = DIFFERENCE_LIMITS[str(dtype).removeprefix("torch.")]
    differences_by_case = {}
    for each in expected:
        try:
            results = run(*each.feeds)
        except Exception as error:  # a graph that depends on its sample's shape raises errors of any class
            raise _parity_error(each.case, f"the graph cannot run it: {' '.join(str(error).split())[-300:]}") from error
        if (result_shapes := _shapes(results)) != (shapes := _shapes(list(each.results.values()))):
            raise _parity_error(each.case, f"results have the shapes {result_shapes} instead of {shapes}")
        differences = [
            _difference(name, result, wanted, each.feeds[1], per_token=per_token)
            for (name, wanted), result in zip(each.results.items(), results, strict=True)
        ]
        worst = max(one.share for one in differences)
        if worst > allowed:
            wrong = largest_difference(differences).largest
            raise _parity_error(each.case, f"results differ by {wrong:.2e}", max_abs_diff=wrong, allowed=allowed)
        differences_by_case[each.case.name] = float(f"{worst:.2e}")
    return differences_by_case


def _shapes(results: Any) -> Any:
    """Return the shapes of results, nested like the results; for anything but a tensor, the name of its class."""
    if isinstance(results, (list, tuple)):
        return [_shapes(each) for each in results]
    return tuple(results.shape) if isinstance(results, torch.Tensor) else type(results).__name__


def _difference(name: str, result: Any, wanted: Any, mask: torch.Tensor, *, per_token: frozenset[str]) -> Difference:
    """Return the difference of an output, without positions of padding."""
    if isinstance(wanted, (list, tuple)):
        pairs = [
            (one.transpose(1, 2)[mask > 0], other.transpose(1, 2)[mask > 0])
            for one, other in zip(result, wanted, strict=True)
        ]
    elif name in per_token:
        real = mask[:, -wanted.shape[1] :] > 0
        pairs = [(result[real], wanted[real])]
    else:
        pairs = [(result, wanted)]
    return largest_difference(
        difference(one.float().numpy(), other.float().numpy(), overflow=True) for one, other in pairs
    )


def _parity_error(case: Case, what: str, **about: object) -> TorchGraphError:
    return TorchGraphError(
        f"the graph is not what PyTorch computes for {case.name} "
        f"({case.batch} x {case.sequence} tokens after {case.past}): {what}",
        reason="EXPORT_PARITY_FAILED",
        remedy="leave this format out for this model",
        about={"case": case.name, **about},
    )
