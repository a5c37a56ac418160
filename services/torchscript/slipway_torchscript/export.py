"""The work of the stages: load, compute what is expected, capture, write, and compare what was written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from slipway.distribution.installed import installed_version
from slipway.errors import TorchGraphError
from slipway.files.regular_file import sha256_of
from slipway.model.families import FEATURE_EXTRACTION
from slipway.model.model_files import copy_companions
from slipway.model.pytorch.rotary import compute_frequencies_in_graph
from slipway.model.sentences.files import UnknownPoolingError, read_pooling
from slipway.stage import Context
from slipway_torchscript import capture, tracing
from slipway_torchscript.cases import cases, sample, unproven
from slipway_torchscript.files import COMPILED, DESCRIPTIONS, PROGRAM, SCRIPT
from slipway_torchscript.interface import Interface, interface_of
from slipway_torchscript.loading import LONGEST_PROOF, Source, open_source
from slipway_torchscript.params import LEVELS, TorchExportParams, TorchScriptParams
from slipway_torchscript.parity import Expected, compare, expect

LIBRARIES = ("torch", "transformers")
_STEPS = 5


def export_torchscript(folder: Path, target: Path, params: TorchScriptParams, ctx: Context) -> None:
    """Write ``model.pt``, ``torchscript.json`` and the model's other files into the empty folder ``target``.

    Raises:
        TorchGraphError: With the reasons that the README lists.
    """
    source, interface, expected = _opened(folder, params, ctx)
    example = interface.feeds(sample(cached=bool(interface.cache), one_row=interface.one_row))
    ctx.progress("tracing", done=2, total=_STEPS, unit="steps")
    script, branches = tracing.traced(interface.module, example, control_flow=params.control_flow)
    if branches and (
        tokens := unproven(positions=source.positions, thresholds=source.thresholds, longest=LONGEST_PROOF)
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
    script = tracing.frozen(script, optimize=params.optimize)
    ctx.progress("writing", done=3, total=_STEPS, unit="steps")
    tracing.save(script, target / SCRIPT)
    per_token, dtype = interface.per_token, interface.dtype
    del source, interface, script, example  # the written graph is compared alone in memory
    ctx.progress("comparing", done=4, total=_STEPS, unit="steps")
    found = compare(torch.jit.load(str(target / SCRIPT)), expected, per_token=per_token, dtype=dtype)
    _finish(folder, target, facts | {"differences": found}, (SCRIPT,), ctx)


def export_program(folder: Path, target: Path, params: TorchExportParams, ctx: Context) -> None:
    """Write ``model.pt2``, ``torch_export.json`` and the model's other files into the empty folder ``target``.

    Raises:
        TorchGraphError: With the reasons that the README lists.
    """
    source, interface, expected = _opened(folder, params, ctx)
    example = interface.feeds(sample(cached=bool(interface.cache), one_row=interface.one_row))
    ctx.progress("capturing", done=2, total=_STEPS, unit="steps")
    program = capture.captured(interface, example, source.positions)
    facts = _facts(source, interface)
    per_token, dtype = interface.per_token, interface.dtype
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
    facts["differences"] = compare(run, expected, per_token=per_token, dtype=dtype)
    if COMPILED in files:
        package = torch._inductor.aoti_load_package(str(target / COMPILED))
        facts["compiled_differences"] = compare(package, expected, per_token=per_token, dtype=dtype)
    _finish(folder, target, facts, tuple(files), ctx)


def _opened(
    folder: Path, params: TorchScriptParams | TorchExportParams, ctx: Context
) -> tuple[Source, Interface, list[Expected]]:
    """Load the model and compute its results for every case, before anything changes it."""
    torch.set_num_threads(ctx.threads)
    ctx.progress("loading", done=0, total=_STEPS, unit="steps")
    dtype = getattr(torch, LEVELS.get(params.level, "float32"))
    source = open_source(folder, dtype=dtype, attention=params.attention)
    pooling = None
    if source.family is FEATURE_EXTRACTION:
        try:
            pooling = read_pooling(folder)
        except UnknownPoolingError as error:
            ctx.warn(f"the graph gives no sentence embedding: {error}")
    interface = interface_of(source, pooling)
    ctx.progress("computing", done=1, total=_STEPS, unit="steps")
    calls = cases(
        cached=bool(interface.cache),
        one_row=interface.one_row,
        positions=source.positions,
        thresholds=source.thresholds,
        longest=LONGEST_PROOF,
    )
    expected = expect(interface, calls)
    compute_frequencies_in_graph(source.model)
    return source, interface, expected


def _compile(program: Any, target: Path, ctx: Context) -> str:
    """Compile the program if a compiler is there; return its path, empty without one."""
    found = capture.compiler()
    if not found:
        ctx.warn(
            f"{COMPILED} is not delivered: AOTInductor needs a C++ compiler ({', '.join(capture.COMPILERS)}), and this worker has none"
        )
        return ""
    scratch = ctx.workdir / "inductor"
    try:
        capture.compile_ahead(program, target / COMPILED, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return found


def _facts(source: Source, interface: Interface) -> dict[str, Any]:
    return {
        "precision": str(interface.dtype).removeprefix("torch."),
        "inputs": list(interface.inputs),
        "outputs": list(interface.outputs),
        "cache": [list(each) for each in interface.cache],
        "max_length": source.positions,
        "one_row": interface.one_row,
        "attention": source.model.config._attn_implementation,
    }


def _finish(folder: Path, target: Path, facts: dict[str, Any], files: tuple[str, ...], ctx: Context) -> None:
    """Copy the model's other files, and describe the graph."""
    copy_companions(folder, target)
    described = facts | {
        "files": {
            name: {"size_bytes": (target / name).stat().st_size, "sha256": _digest(target / name, ctx)}
            for name in files
        },
        "libraries": {name: installed_version(name) for name in LIBRARIES},
    }
    (target / DESCRIPTIONS[files[0]]).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    ctx.record(**described)


def _digest(path: Path, ctx: Context) -> str:
    ctx.check_cancelled()
    found = sha256_of(path)
    ctx.digest(path, found)
    return found
