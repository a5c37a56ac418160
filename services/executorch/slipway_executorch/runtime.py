"""Run a program by ExecuTorch's own runtime, one row of tokens at a time.

A program holds a single cache, so a row's past is the list of its tokens: if the cache holds another row, they are computed again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from executorch.extension.pybindings import portable_lib
from executorch.kernels import quantized  # noqa: F401 - registers the kernels of rounded embeddings
from executorch.runtime import Runtime

from slipway.distribution import installed_version
from slipway.files.json_documents import read_object_or_empty
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, Family
from slipway.proof.numerics import Logits
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import Bounds, LanguageModel, NotRunnable, Step, Unusable, read_config
from slipway.proof.text_models import RowDecoder, TextReader
from slipway.texts import one_line, shortened
from slipway.validation.speed import Engine
from slipway_executorch.params import DESCRIPTION, PROGRAM

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
            raise Unusable(f"ExecuTorch cannot load {file.name}: {_error_summary(error)}") from error
        if len(sizes) != 2 or sizes[0] != 1 or sizes[1] < 1:
            raise Unusable(f"its first input has the shape {list(sizes)}, and not one row of tokens")
        self.longest = int(sizes[1])

    def constant(self, name: str) -> int:
        """Return a constant of the program.

        Raises:
            Unusable: It has no constant of this name, or one that is not a positive integer.
        """
        if name not in self._program.method_names:
            raise Unusable(f"it has no method {name}")
        value = self._program.load_method(name).execute([])[0]
        if not isinstance(value, int) or value < 1:
            raise Unusable(f"its method {name} returns {value!r}")
        return value

    def run(self, *inputs: np.ndarray[Any, Any]) -> list[Logits]:
        """Return the outputs of one call."""
        values = [torch.from_numpy(np.ascontiguousarray(value)) for value in inputs]
        try:
            results = self._forward.execute(values)
        except RuntimeError as error:
            raise Unusable(f"ExecuTorch cannot run it: {_error_summary(error)}") from error
        return [value.float().numpy() for value in results]


class _Model(LanguageModel):
    def __init__(self, program: Program, bounds: Bounds, *, stored: str) -> None:
        self._program, self.bounds = program, bounds
        self.native_dtype = "float32"
        self.engine = Engine(
            runtime="executorch",
            version=f"executorch {installed_version('executorch')}",
            provider="XNNPACK",
            stored_dtype=stored or "float32",
            compute_dtype="float32",
            native_dtype="float32",
        )


class ExecutorchDecoder(RowDecoder, _Model):
    """A decoder that holds its cache. The state of a row is the list of its tokens."""

    def __init__(self, program: Program, *, stored: str) -> None:
        if program.inputs != 2:
            raise Unusable(f"it has {program.inputs} inputs; a decoder has tokens and their places")
        self.length = program.constant("get_max_context_len")
        self._vocabulary = program.constant("get_vocab_size")
        super().__init__(program, Bounds(1, self.length, self.length - 1), stored=stored)
        self._held: list[int] = []

    def empty(self) -> list[int]:
        """As :meth:`slipway.proof.text_models.RowDecoder.empty`."""
        return []

    def extend(self, state: list[int], start: int, tokens: list[int]) -> tuple[Logits, list[int]]:
        """As :meth:`slipway.proof.text_models.RowDecoder.extend`; computes the earlier tokens again if the cache lacks them."""
        if self._held[:start] != state:
            self._feed(0, state)
        logits = self._feed(start, tokens)
        self._held = [*state, *tokens]
        return logits, self._held

    def _feed(self, start: int, tokens: list[int]) -> Logits:
        """Compute tokens from position ``start`` on, in as many calls as they need; return their logits, (S, V)."""
        parts = []
        for first in range(0, len(tokens), self._program.longest):
            ids = np.array([tokens[first : first + self._program.longest]], dtype=np.int64)
            parts.append(self._program.run(ids, start + first + np.arange(ids.shape[1]))[0][0])
        return np.concatenate(parts) if parts else np.zeros((0, self._vocabulary), dtype=np.float32)


class ExecutorchText(TextReader, _Model):
    """A model that reads a whole text in one call."""

    def __init__(
        self, program: Program, family: Family, config: ModelConfig, outputs: list[str], *, stored: str
    ) -> None:
        self._outputs = outputs
        self.read_as(family, config, outputs)
        super().__init__(program, Bounds(1, program.longest, 0), stored=stored)

    def results(self, step: Step, names: tuple[str, ...]) -> list[Logits]:
        """As :meth:`slipway.proof.text_models.TextReader.results`."""
        tokens = step.input_ids.shape[1]
        if tokens > self._program.longest:
            raise NotRunnable(f"the program takes {self._program.longest} tokens, and the samples have {tokens}")
        rows = []
        for ids, mask in zip(step.input_ids, step.attention_mask, strict=True):
            given = (ids[None], mask[None], np.zeros_like(ids[None]))[: self._program.inputs]
            rows.append(self._program.run(*given))
        places = [self._outputs.index(name) for name in names]
        return [np.concatenate([row[place] for row in rows]) for place in places]


def _error_summary(error: Exception) -> str:
    """Return the runtime's message, on one line."""
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
    outputs = read_object_or_empty(folder / DESCRIPTION).get("outputs")
    if not isinstance(outputs, list) or not set(family.outputs) <= set(map(str, outputs)):
        raise Unusable(f"{DESCRIPTION} does not name the outputs of a {family.name}")
    return ExecutorchText(program, family, config, list(map(str, outputs)), stored=stored)
