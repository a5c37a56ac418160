"""Run a program by LiteRT's interpreter; only the process that validates an output imports this.

The cache of a decoder is a value that goes in and out, so the past of a row is the number of its tokens and its cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slipway.distribution.installed import installed_version
from slipway.model.families import DECODER, Comparison, Family
from slipway.model.sentences.pooling import SENTENCE_EMBEDDING
from slipway.validation.speed import Engine
from slipway_litert.files import PROGRAM
from slipway_litert.program import BadProgramError, DecoderProgram, Program, TextProgram
from slipway_validate.folders import stored_dtype
from slipway_validate.numerics import Logits
from slipway_validate.runner.model import (
    Bounds,
    LanguageModel,
    NotRunnable,
    Past,
    Step,
    Unusable,
    class_results,
    read_config,
)


class _Model(LanguageModel):
    def __init__(self, bounds: Bounds, *, stored: str, has_cache: bool) -> None:
        self.bounds, self.has_cache = bounds, has_cache
        self.native_dtype = "float32"
        self.engine = Engine(
            runtime="litert",
            version=f"ai-edge-litert {installed_version('ai-edge-litert')}",
            provider="XNNPACK",
            stored_dtype=stored or "float32",
            compute_dtype="float32",
            native_dtype="float32",
        )


class LitertDecoder(_Model):
    """A decoder with its cache as a value; see :class:`slipway_validate.runner.model.LanguageModel`."""

    def __init__(self, program: DecoderProgram, *, stored: str) -> None:
        self._program = program
        super().__init__(Bounds(1, program.length, program.length - 1), stored=stored, has_cache=True)

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway_validate.runner.model.LanguageModel.forward`."""
        new = step.attention_mask[:, -step.input_ids.shape[1] :].astype(bool)
        before = step.past or [(0, self._program.empty()) for _ in new]
        results, past = [], []
        for row, (ids, real) in enumerate(zip(step.input_ids, new, strict=True)):
            tokens = [int(token) for token in ids[real]]
            start, cache = before[row]
            total = start + len(tokens)
            if list(step.position_ids[row][real]) != list(range(start, total)):
                raise NotRunnable("the program takes tokens at places in a row only")
            if total > self._program.length:
                raise NotRunnable(
                    f"its KV cache has room for {self._program.length} tokens, and the samples have {total}: set max_length of the export to that or more"
                )
            found, cache = _run(self._program, tokens, start, cache)
            logits = np.zeros((len(ids), found.shape[-1]), dtype=np.float32)
            logits[real] = found
            results.append(logits)
            past.append((total, cache))
        return np.stack(results), past


def _run(program: DecoderProgram, tokens: list[int], start: int, cache: Any) -> tuple[Logits, Any]:
    try:
        return program.run(tokens, start, cache)
    except BadProgramError as error:
        raise Unusable(str(error)) from error


class LitertText(_Model):
    """A model that reads a whole text in one call."""

    def __init__(self, program: TextProgram, family: Family, *, several_labels: bool, stored: str) -> None:
        self._program, self._family, self._several_labels = program, family, several_labels
        self.embeds = SENTENCE_EMBEDDING in program.outputs
        super().__init__(Bounds(1, program.longest, 0), stored=stored, has_cache=False)

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway_validate.runner.model.LanguageModel.forward`."""
        found = self._results(step)
        if self._family.comparison is Comparison.SPANS:
            return np.stack([found[name] for name in self._family.outputs], axis=1), None
        results = found[self._family.outputs[0]]
        if self._family.comparison is Comparison.CLASSES:
            return class_results(results, several_labels=self._several_labels), None
        return results, None

    def embed(self, step: Step) -> Logits:
        """As :meth:`slipway_validate.runner.model.LanguageModel.embed`."""
        return self._results(step)[SENTENCE_EMBEDDING][:, None]

    def _results(self, step: Step) -> dict[str, Logits]:
        tokens = step.input_ids.shape[1]
        if tokens > self._program.longest:
            raise NotRunnable(f"the program takes {self._program.longest} tokens, and the samples have {tokens}")
        try:
            rows = [self._program.run(ids, mask) for ids, mask in zip(step.input_ids, step.attention_mask, strict=True)]
        except BadProgramError as error:
            raise Unusable(str(error)) from error
        return {name: np.concatenate([row[name] for row in rows]) for name in self._program.outputs}


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
    return LitertText(reader, family, several_labels=config.has_several_labels, stored=stored)
