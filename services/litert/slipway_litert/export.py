"""The work of the stage: load, convert to a program of fixed shapes, compare with PyTorch, round, and write.

The written program is compared on texts of several lengths and through every signature.

Axes: S = tokens of a text, V = vocabulary.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import litert_torch
import numpy as np
import torch

from slipway.errors import LiteRtExportError
from slipway.model.families import DECODER
from slipway.model.pytorch.text_model import TextModel, describe_program, file_digest
from slipway.model.pytorch.traced_forms import use_transformers_attention
from slipway.proof.comparison import DIFFERENCE_LIMITS, difference
from slipway.stage import Context
from slipway_litert.modules import StaticDecoder, TextReader, open_source, padding_of
from slipway_litert.params import DECODE, DESCRIPTION, LEVEL, PREFILL, PROGRAM, TEXT, LitertParams, text_lengths
from slipway_litert.runtime import Array, BadProgramError, DecoderProgram, Program, TextProgram

LIBRARIES = ("ai-edge-litert", "ai-edge-quantizer", "litert-converter", "litert-torch", "torch", "transformers")
_STEPS = 4
_CANNOT, _REASON = "cannot be converted for LiteRT", "LITERT_CONVERSION_FAILED"
_MOST_BYTES = (1 << 31) - (1 << 24)
"""Largest file of this format, whose offsets have 31 bits."""

Sample = Mapping[str, torch.Tensor]
Pairs = list[tuple[Array, Array]]

_LONGEST_TEXT = 512
"""Most tokens of a text for a decoder."""
_SINGLE_CALLS = 3


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
    describe_program(source.folder, target, DESCRIPTION, facts, libraries=LIBRARIES, ctx=ctx)


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
    if differences[worst] > (limit := DIFFERENCE_LIMITS["float32"]):
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


def largest_difference(source: TextModel, module: torch.nn.Module, file: Path, *, threads: int) -> dict[str, float]:
    """Return the program's largest difference from PyTorch by case, as a share of the largest result and of 1.

    PyTorch computes with transformers' own attention, not with the attention that was converted.

    Raises:
        LiteRtExportError: ``EXPORT_PARITY_FAILED`` if the program cannot be run, or returns NaN or infinity.
    """
    use_transformers_attention(source.model)
    try:
        program = Program(file, threads=threads)
        cases = (
            _decoder_cases(source, DecoderProgram(program))
            if source.family is DECODER
            else _reader_cases(source, module, program)
        )
        differences = {name: max(difference(one, other).share for one, other in pairs) for name, pairs in cases}
    except BadProgramError as error:
        raise parity_error(f"the program cannot be run: {error}") from error
    odd = next((name for name, value in differences.items() if not np.isfinite(value)), None)
    if odd is not None:
        raise parity_error(f"the program gives values that are no numbers for {odd}")
    return {name: float(f"{value:.2e}") for name, value in differences.items()}


def parity_error(what: str, **about: object) -> LiteRtExportError:
    """Return the error for a program that differs from PyTorch."""
    return LiteRtExportError(
        what, reason="EXPORT_PARITY_FAILED", remedy="leave the LiteRT format out for this model", about=about
    )


def _decoder_cases(source: TextModel, program: DecoderProgram) -> Iterator[tuple[str, Pairs]]:
    """Yield logits of a text, and of another text over the cache of the first: a long call, then one call per token."""
    window = getattr(source.model.config.get_text_config(), "sliding_window", None)
    beyond = (window if isinstance(window, int) else 0) + program.call_length + _SINGLE_CALLS
    size = min(program.length, beyond, _LONGEST_TEXT)
    first = max(1, size - _SINGLE_CALLS)
    cache = program.empty()
    for name in ("text", "text after another"):
        ids = _tokens(source, size, seed=len(name))
        with torch.no_grad():
            wanted = source.model(input_ids=torch.tensor([ids])).logits[0].numpy()  # (S, V)
        logits, cache = program.run(ids[:first], 0, cache)
        pairs = [(logits, wanted[:first])]
        for place in range(first, size):
            logits, cache = program.run(ids[place : place + 1], place, cache)
            pairs.append((logits, wanted[place : place + 1]))
        yield f"{name} of {size} tokens", pairs


def _reader_cases(source: TextModel, module: torch.nn.Module, program: Program) -> Iterator[tuple[str, Pairs]]:
    """Yield results of a text that fills a signature, and of a shorter one, for each signature."""
    reader = TextProgram(program, source.family, padding=padding_of(source))
    sizes = [size for size in text_lengths(reader.longest) if f"{TEXT}{size}" in program.shapes]
    for size in sorted({length for each in sizes for length in (each, max(1, each - _SINGLE_CALLS))}):
        ids = np.array(_tokens(source, size, seed=size))
        types = np.arange(size) % 2 if "token_type_ids" in program.shapes[f"{TEXT}{sizes[-1]}"] else None
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": types}
        with torch.no_grad():
            wanted = module(
                **{name: torch.from_numpy(value)[None] for name, value in given.items() if value is not None}
            )
        results = reader.run(ids, np.ones_like(ids), types)
        yield (
            f"text of {size} tokens",
            [(results[name], wanted[name].numpy()) for name in wanted],
        )


def _tokens(source: TextModel, count: int, *, seed: int) -> list[int]:
    vocabulary = int(source.model.config.get_text_config().vocab_size)
    ids = np.random.default_rng(seed).integers(min(3, vocabulary - 1), vocabulary, count)
    padding = padding_of(source)
    return [int(each) if each != padding else (padding + 1) % vocabulary for each in ids]
