"""Run a program by LiteRT's interpreter; only the process that validates an output imports this.

A decoder takes and returns its cache, so a row's past is the number of its tokens and its cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slipway.distribution.installed import installed_version
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, Family
from slipway.proof.numerics import Logits
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import Bounds, LanguageModel, NotRunnable, Step, Unusable, read_config
from slipway.proof.text_models import RowDecoder, TextReader
from slipway.validation.speed import Engine
from slipway_litert.params import PROGRAM
from slipway_litert.program import BadProgramError, DecoderProgram, Program, TextProgram


class _Model(LanguageModel):
    def __init__(self, bounds: Bounds, *, stored: str) -> None:
        self.bounds = bounds
        self.native_dtype = "float32"
        self.engine = Engine(
            runtime="litert",
            version=f"ai-edge-litert {installed_version('ai-edge-litert')}",
            provider="XNNPACK",
            stored_dtype=stored or "float32",
            compute_dtype="float32",
            native_dtype="float32",
        )


class LitertDecoder(RowDecoder, _Model):
    """A decoder that takes and returns its cache."""

    def __init__(self, program: DecoderProgram, *, stored: str) -> None:
        self._program, self.length = program, program.length
        super().__init__(Bounds(1, program.length, program.length - 1), stored=stored)

    def empty(self) -> Any:
        """As :meth:`slipway.proof.text_models.RowDecoder.empty`."""
        return self._program.empty()

    def extend(self, state: Any, start: int, tokens: list[int]) -> tuple[Logits, Any]:
        """As :meth:`slipway.proof.text_models.RowDecoder.extend`."""
        try:
            return self._program.run(tokens, start, state)
        except BadProgramError as error:
            raise Unusable(str(error)) from error


class LitertText(TextReader, _Model):
    """A model that reads a whole text in one call."""

    def __init__(self, program: TextProgram, family: Family, config: ModelConfig, *, stored: str) -> None:
        self._program = program
        self.read_as(family, config, program.outputs)
        super().__init__(Bounds(1, program.longest, 0), stored=stored)

    def results(self, step: Step, names: tuple[str, ...]) -> list[Logits]:
        """As :meth:`slipway.proof.text_models.TextReader.results`."""
        tokens = step.input_ids.shape[1]
        if tokens > self._program.longest:
            raise NotRunnable(f"the program takes {self._program.longest} tokens, and the samples have {tokens}")
        try:
            rows = [self._program.run(ids, mask) for ids, mask in zip(step.input_ids, step.attention_mask, strict=True)]
        except BadProgramError as error:
            raise Unusable(str(error)) from error
        return [np.concatenate([row[name] for row in rows]) for name in names]


def load(folder: Path, *, threads: int) -> LanguageModel:
    """Load an output.

    Raises:
        Unusable: LiteRT cannot load the program, or it is not one of the model's family.
    """
    config, family = read_config(folder)
    stored = stored_dtype(folder)
    try:
        program = Program(folder / PROGRAM, threads=threads)
        if family is DECODER:
            return LitertDecoder(DecoderProgram(program), stored=stored)
        reader = TextProgram(program, family, padding=config.padding)
    except BadProgramError as error:
        raise Unusable(str(error)) from error
    return LitertText(reader, family, config, stored=stored)
