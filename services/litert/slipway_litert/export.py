"""The work of the stage: load, convert to a program of fixed shapes, prove, round, and write it with its description."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import litert_torch
import torch

from slipway.model.families import DECODER
from slipway.model.pytorch.text_model import TextModel, describe_program, file_digest
from slipway.proof.differences import LIMITS
from slipway.stage import Context
from slipway_litert.loading import open_source
from slipway_litert.modules import StaticDecoder, TextReader
from slipway_litert.params import DECODE, DESCRIPTION, LEVEL, PREFILL, PROGRAM, TEXT, LitertParams, text_lengths
from slipway_litert.parity import largest_difference, parity_error
from slipway_litert.program import Program

LIBRARIES = ("ai-edge-litert", "ai-edge-quantizer", "litert-converter", "litert-torch", "torch", "transformers")
_STEPS = 4
_CANNOT, _REASON = "cannot be converted for LiteRT", "LITERT_CONVERSION_FAILED"
_MOST_BYTES = (1 << 31) - (1 << 24)
"""Largest file of this format, whose offsets have 31 bits."""

Sample = Mapping[str, torch.Tensor]


def export_model(folder: Path, target: Path, params: LitertParams, ctx: Context) -> None:
    """Write ``model.tflite``, ``litert.json`` and the model's other files into the empty folder ``target``.

    Raises:
        LiteRtExportError: With the reasons that the README lists.
    """
    torch.set_num_threads(ctx.threads)
    ctx.progress("loading", done=0, total=_STEPS, unit="steps")
    source = open_source(folder)
    length = source.length(params.max_length, ctx)
    program, plain = target / PROGRAM, ctx.workdir / "float32.tflite"
    try:
        module, samples = _module(source, length, min(params.call_length, length), ctx)
        ctx.progress("converting", done=1, total=_STEPS, unit="steps")
        convert(module, samples, plain)
    except MemoryError:
        raise
    except Exception as error:  # torch.export, jax and the converter raise errors of any class
        raise source.step_error(_CANNOT, _REASON, error) from error
    ctx.progress("comparing", done=2, total=_STEPS, unit="steps")
    differences = _check_parity(source, module, plain, ctx)
    ctx.progress("writing", done=3, total=_STEPS, unit="steps")
    if params.level == LEVEL:
        differences, proven = _write_int8(source, module, plain, program, ctx), differences
    else:
        plain.rename(program)
        proven = differences
    facts = {
        "precision": "float32" if params.level == "none" else params.level,
        "signatures": {name: list(sample) for name, sample in samples.items()},
        "outputs": list(module.outputs) if isinstance(module, TextReader) else ["logits"],
        "max_length": length,
        "differences_in_float32": proven,
        "differences": differences,
        "size_bytes": program.stat().st_size,
        "sha256": file_digest(program, ctx),
    }
    describe_program(folder, target, DESCRIPTION, facts, libraries=LIBRARIES, ctx=ctx)


def _module(source: TextModel, length: int, call_length: int, ctx: Context) -> tuple[Any, dict[str, Sample]]:
    """Return the module to convert, and sample inputs for each signature."""
    if source.family is DECODER:
        decoder = StaticDecoder(source.model, length)
        return decoder, {PREFILL: decoder.sample(call_length), DECODE: decoder.sample(1)}
    reader = TextReader(source.model, source.family, source.pooling("program", ctx))
    return reader, {f"{TEXT}{size}": reader.sample(size) for size in text_lengths(length)}


def _check_parity(source: TextModel, module: torch.nn.Module, file: Path, ctx: Context) -> dict[str, float]:
    """Check the float32 program against PyTorch; return their largest difference by case.

    Raises:
        LiteRtExportError: ``EXPORT_PARITY_FAILED`` if a difference is too large.
    """
    differences = largest_difference(source, module, file, threads=ctx.threads)
    worst = max(differences, key=lambda name: differences[name])
    if differences[worst] > (limit := LIMITS["float32"]):
        raise parity_error(
            f"the program is not what PyTorch computes: results of a {worst} differ by {differences[worst]:.1e}, and {limit:.0e} is allowed",
            case=worst,
            allowed=limit,
        )
    return differences


def _write_int8(
    source: TextModel, module: torch.nn.Module, plain: Path, program: Path, ctx: Context
) -> dict[str, float]:
    """Write the program with rounded weights; return its differences from PyTorch, which validation judges."""
    try:
        round_weights(plain, program)
    except MemoryError:
        raise
    except Exception as error:  # the quantizer raises errors of any class
        raise source.step_error(_CANNOT, _REASON, error) from error
    if not Program(program, threads=1).integers:
        raise source.step_error(_CANNOT, _REASON, ValueError("the quantizer rounded no weight"))
    plain.unlink()
    return largest_difference(source, module, program, threads=ctx.threads)


def convert(module: torch.nn.Module, samples: Mapping[str, Sample], target: Path) -> None:
    """Write a program with a signature for each sample; they share the weights."""
    litert_torch.config.show_progress = False
    litert_torch.config.silence_torch_logs = False  # true would change this process's log levels and handlers for good
    converter = litert_torch.Converter()
    for name, sample in samples.items():
        converter.add_signature(name, module.eval(), sample_kwargs=dict(sample))
    with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
        converter.convert().export(str(target))


def round_weights(source: Path, target: Path) -> None:
    """Write a program with 8-bit weights and a scale for each row; its products round their inputs at run time."""
    from ai_edge_quantizer import quantizer, recipe

    with contextlib.redirect_stdout(sys.stderr):
        rounding: Any = quantizer.Quantizer(str(source), recipe.dynamic_wi8_afp32())
        rounding.quantize().export_model(str(target))
