"""Run a program by ExecuTorch's own runtime, one row of tokens after another.

A program has a single cache inside. The past of a row is therefore the list of its tokens: if the cache holds another row, they are
computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from executorch.extension.pybindings import portable_lib
from executorch.kernels import quantized  # noqa: F401 - registers the kernels of rounded embeddings
from executorch.runtime import Runtime

from slipway.distribution.installed import installed_version
from slipway.model.families import DECODER, Comparison, Family
from slipway.model.sentences.pooling import SENTENCE_EMBEDDING
from slipway.texts import one_line, shortened
from slipway.validation.speed import Engine
from slipway_executorch.files import DESCRIPTION, PROGRAM
from slipway_validate.folders import read_json, stored_dtype
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

FORWARD = "forward"
_LONGEST_MESSAGE = 300


class Program:
    """A loaded ``model.pte``.

    Attributes:
        inputs: Number of inputs.
        longest: Most tokens of one call.
    """

    def __init__(self, file: Path, *, threads: int) -> None:
        portable_lib._unsafe_reset_threadpool(threads)
        try:
            self._program = Runtime.get().load_program(file)
            self._forward = self._program.load_method(FORWARD)
            described = self._program.metadata(FORWARD)
            self.inputs = described.num_inputs()
            sizes = described.input_tensor_meta(0).sizes()
        except (RuntimeError, KeyError, IndexError) as error:
            raise Unusable(f"ExecuTorch cannot load {file.name}: {_said(error)}") from error
        if len(sizes) != 2 or sizes[0] != 1 or sizes[1] < 1:
            raise Unusable(f"its first input has the shape {list(sizes)}, and not one row of tokens")
        self.longest = int(sizes[1])

    def constant(self, name: str) -> int:
        """Return a constant of the program.

        Raises:
            Unusable: It has none of this name, or it is no number.
        """
        if name not in self._program.method_names:
            raise Unusable(f"it has no method {name}")
        found = self._program.load_method(name).execute([])[0]
        if not isinstance(found, int) or found < 1:
            raise Unusable(f"its method {name} returns {found!r}")
        return found

    def run(self, *inputs: np.ndarray[Any, Any]) -> list[Logits]:
        """Return the outputs of one call."""
        values = [torch.from_numpy(np.ascontiguousarray(value)) for value in inputs]
        try:
            found = self._forward.execute(values)
        except RuntimeError as error:
            raise Unusable(f"ExecuTorch cannot run it: {_said(error)}") from error
        return [value.float().numpy() for value in found]


class _Model(LanguageModel):
    def __init__(self, program: Program, bounds: Bounds, *, stored: str, has_cache: bool) -> None:
        self._program, self.bounds, self.has_cache = program, bounds, has_cache
        self.native_dtype = "float32"
        self.engine = Engine(
            runtime="executorch",
            version=f"executorch {installed_version('executorch')}",
            provider="XNNPACK",
            stored_dtype=stored or "float32",
            compute_dtype="float32",
            native_dtype="float32",
        )


class ExecutorchDecoder(_Model):
    """A decoder with its cache inside; see :class:`slipway_validate.runner.model.LanguageModel`."""

    def __init__(self, program: Program, *, stored: str) -> None:
        if program.inputs != 2:
            raise Unusable(f"it has {program.inputs} inputs; a decoder has tokens and their places")
        self._length = program.constant("get_max_context_len")
        self._vocabulary = program.constant("get_vocab_size")
        super().__init__(program, Bounds(1, self._length, self._length - 1), stored=stored, has_cache=True)
        self._held: list[int] = []

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway_validate.runner.model.LanguageModel.forward`."""
        new = step.attention_mask[:, -step.input_ids.shape[1] :].astype(bool)
        before: Sequence[tuple[int, ...]] = step.past or [()] * len(new)
        results, past = [], []
        for row, (ids, real) in enumerate(zip(step.input_ids, new, strict=True)):
            tokens = [int(token) for token in ids[real]]
            if list(step.position_ids[row][real]) != list(range(len(before[row]), len(before[row]) + len(tokens))):
                raise NotRunnable("the program takes tokens at places in a row only")
            found = self._continue(before[row], tokens)
            logits = np.zeros((len(ids), found.shape[-1]), dtype=np.float32)
            logits[real] = found
            results.append(logits)
            past.append((*before[row], *tokens))
        return np.stack(results), past

    def _continue(self, before: tuple[int, ...], tokens: list[int]) -> Logits:
        """Return logits of tokens behind others, (S, V), which the cache holds already or gets first."""
        total = len(before) + len(tokens)
        if total > self._length:
            raise NotRunnable(
                f"its KV cache has room for {self._length} tokens, and the samples have {total}: set max_length of the export to that or more"
            )
        if self._held[: len(before)] != list(before):
            self._feed(0, list(before))
        found = self._feed(len(before), tokens)
        self._held = [*before, *tokens]
        return found

    def _feed(self, start: int, tokens: list[int]) -> Logits:
        """Compute tokens from a place on in as many calls as they need; return their logits, (S, V)."""
        parts = []
        for first in range(0, len(tokens), self._program.longest):
            ids = np.array([tokens[first : first + self._program.longest]], dtype=np.int64)
            parts.append(self._program.run(ids, start + first + np.arange(ids.shape[1]))[0][0])
        return np.concatenate(parts) if parts else np.zeros((0, self._vocabulary), dtype=np.float32)


class ExecutorchText(_Model):
    """A model that reads a whole text in one call."""

    def __init__(
        self, program: Program, family: Family, outputs: list[str], *, several_labels: bool, stored: str
    ) -> None:
        self._family, self._several_labels, self._outputs = family, several_labels, outputs
        self.embeds = SENTENCE_EMBEDDING in outputs
        super().__init__(program, Bounds(1, program.longest, 0), stored=stored, has_cache=False)

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway_validate.runner.model.LanguageModel.forward`."""
        found = self._run(step)
        if self._family.comparison is Comparison.SPANS:
            return np.stack([found[name] for name in self._family.outputs], axis=1), None
        results = found[self._family.outputs[0]]
        if self._family.comparison is Comparison.CLASSES:
            return class_results(results, several_labels=self._several_labels), None
        return results, None

    def embed(self, step: Step) -> Logits:
        """As :meth:`slipway_validate.runner.model.LanguageModel.embed`."""
        return self._run(step)[SENTENCE_EMBEDDING][:, None]

    def _run(self, step: Step) -> dict[str, Logits]:
        tokens = step.input_ids.shape[1]
        if tokens > self._program.longest:
            raise NotRunnable(f"the program takes {self._program.longest} tokens, and the samples have {tokens}")
        rows = []
        for ids, mask in zip(step.input_ids, step.attention_mask, strict=True):
            given = (ids[None], mask[None], np.zeros_like(ids[None]))[: self._program.inputs]
            rows.append(self._program.run(*given))
        return {name: np.concatenate(parts) for name, parts in zip(self._outputs, zip(*rows, strict=True), strict=True)}


def _said(error: Exception) -> str:
    """Return what the runtime says, on one line."""
    return shortened(one_line(str(error)), _LONGEST_MESSAGE)


def load(folder: Path, *, threads: int) -> LanguageModel:
    """Load an output.

    Raises:
        Unusable: ExecuTorch cannot load the program, or it is not one of the model's family.
    """
    config, family = read_config(folder)
    program, stored = Program(folder / PROGRAM, threads=threads), stored_dtype(folder)
    if family is DECODER:
        return ExecutorchDecoder(program, stored=stored)
    outputs = read_json(folder / DESCRIPTION).get("outputs")
    if not isinstance(outputs, list) or not set(family.outputs) <= set(map(str, outputs)):
        raise Unusable(f"{DESCRIPTION} does not name the outputs of a {family.name}")
    return ExecutorchText(
        program, family, list(map(str, outputs)), several_labels=config.has_several_labels, stored=stored
    )
