"""Compare a written program with the PyTorch model, on texts of several lengths and through every signature.

Axes: S = tokens of a text, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from slipway.errors import LiteRtExportError
from slipway.model.families import DECODER
from slipway.model.pytorch.own_attention import use_transformers_attention
from slipway.model.pytorch.text_model import TextModel
from slipway.proof.differences import difference
from slipway_litert.loading import padding_of
from slipway_litert.params import TEXT, text_lengths
from slipway_litert.program import Array, BadProgramError, DecoderProgram, Program, TextProgram

_LONGEST = 512
"""Most tokens of a text for a decoder."""
_STEPS = 3


def largest_difference(source: TextModel, module: torch.nn.Module, file: Path, *, threads: int) -> dict[str, float]:
    """Return the program's largest difference from PyTorch by case, as a share of the largest result and of 1.

    PyTorch computes with transformers' own attention, not with the attention that was converted.

    Raises:
        LiteRtExportError: ``EXPORT_PARITY_FAILED`` if the program cannot be run, or returns NaN or infinity.
    """
    use_transformers_attention(source.model)
    try:
        program = Program(file, threads=threads)
        cases = _texts(source, DecoderProgram(program)) if source.family is DECODER else _rows(source, module, program)
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


Pairs = list[tuple[Array, Array]]


def _texts(source: TextModel, program: DecoderProgram) -> Iterator[tuple[str, Pairs]]:
    """Yield logits of a text, and of another text over the cache of the first: a long call, then one call per token."""
    window = getattr(source.model.config.get_text_config(), "sliding_window", None)
    beyond = (window if isinstance(window, int) else 0) + program.call_length + _STEPS
    size = min(program.length, beyond, _LONGEST)
    first = max(1, size - _STEPS)
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


def _rows(source: TextModel, module: torch.nn.Module, program: Program) -> Iterator[tuple[str, Pairs]]:
    """Yield results of a text that fills a signature, and of a shorter one, for each signature."""
    reader = TextProgram(program, source.family, padding=padding_of(source))
    sizes = [size for size in text_lengths(reader.longest) if f"{TEXT}{size}" in program.shapes]
    for size in sorted({length for each in sizes for length in (each, max(1, each - _STEPS))}):
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
