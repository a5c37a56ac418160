"""Run a program by LiteRT's interpreter: its signatures one row at a time, and as a model of the validation.

A decoder takes and returns its cache, so a row's past is the number of its tokens and its cache.

Axes: S = tokens of a call, P = places of a signature, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter

from slipway.distribution import installed_version
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, SEQUENCE_CLASSIFIER, Family
from slipway.proof.numerics import Logits
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import Bounds, LanguageModel, NotRunnable, Step, Unusable, read_config
from slipway.proof.text_models import RowDecoder, TextReader
from slipway.validation.speed import Engine
from slipway_litert.params import DECODE, KEYS, LOGITS, PLACES, PREFILL, PROGRAM, TEXT, TOKENS, VALUES

Array = np.ndarray[Any, Any]
Cache = dict[str, Array]


class BadProgramError(Exception):
    """The file cannot be run as its description says; the message says why."""


class Program:
    """A loaded ``model.tflite``.

    Attributes:
        shapes: Shape of each input by signature and name.
        integers: Number of tensors of 8 bits.
    """

    def __init__(self, file: Path, *, threads: int) -> None:
        """Load a file.

        Raises:
            BadProgramError: LiteRT refuses it, or its inputs have no fixed shape.
        """
        try:
            self._interpreter = Interpreter(model_path=str(file), num_threads=threads)
            self._runners = {
                name: self._interpreter.get_signature_runner(name) for name in self._interpreter.get_signature_list()
            }
            details = {name: runner.get_input_details() for name, runner in self._runners.items()}
            self._results = {name: sorted(runner.get_output_details()) for name, runner in self._runners.items()}
            self.integers = sum(each["dtype"] is np.int8 for each in self._interpreter.get_tensor_details())
        except (RuntimeError, ValueError, KeyError) as error:
            raise BadProgramError(f"LiteRT cannot load {file.name}: {error}") from error
        self.shapes = {
            signature: {name: tuple(map(int, each["shape_signature"])) for name, each in inputs.items()}
            for signature, inputs in details.items()
        }
        self._kinds = {
            signature: {name: each["dtype"] for name, each in inputs.items()} for signature, inputs in details.items()
        }
        if any(min(shape, default=1) < 1 for inputs in self.shapes.values() for shape in inputs.values()):
            raise BadProgramError("an input of it has no fixed shape")

    def outputs(self, signature: str) -> list[str]:
        """Return the names of a signature's outputs."""
        return self._results[signature]

    def run(self, signature: str, given: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of one call.

        Raises:
            BadProgramError: LiteRT cannot run it.
        """
        kinds = self._kinds[signature]
        try:
            results: dict[str, Array] = self._runners[signature](
                **{name: np.ascontiguousarray(given[name], dtype=kind) for name, kind in kinds.items()}
            )
        except (RuntimeError, ValueError, KeyError) as error:
            raise BadProgramError(f"LiteRT cannot run {signature}: {error}") from error
        return results


class DecoderProgram:
    """A decoder: tokens of one text, a cache in and a cache out.

    Attributes:
        length: Places of the cache.
        call_length: Tokens of a call of ``prefill``.
    """

    def __init__(self, program: Program) -> None:
        """Check the signatures.

        Raises:
            BadProgramError: They are not those of a decoder.
        """
        self._program = program
        both = [program.shapes.get(name) for name in (PREFILL, DECODE)]
        if not all(each and {TOKENS, PLACES, f"{KEYS}0", f"{VALUES}0"} <= each.keys() for each in both):
            raise BadProgramError(f"it lacks the signatures {PREFILL} and {DECODE} of a decoder")
        prefill, decode = program.shapes[PREFILL], program.shapes[DECODE]
        self._cache = {name: shape for name, shape in decode.items() if name.startswith((KEYS, VALUES))}
        lengths = {shape[2] for shape in self._cache.values() if len(shape) == 4}
        same = self._cache == {name: prefill.get(name) for name in self._cache}
        results = all({LOGITS, *self._cache} <= set(program.outputs(name)) for name in (PREFILL, DECODE))
        if len(lengths) != 1 or not same or not results or decode[TOKENS] != (1, 1):
            raise BadProgramError("its signatures do not take and give one cache of fixed size")
        (self.length,), self.call_length = lengths, prefill[TOKENS][-1]

    def empty(self) -> Cache:
        """Return an empty cache."""
        return {name: np.zeros(shape, dtype=np.float32) for name, shape in self._cache.items()}

    def run(self, tokens: list[int], start: int, cache: Cache) -> tuple[Array, Cache]:
        """Return logits (S, V) of tokens at the positions from ``start`` on, and the cache extended by them.

        A short prefill is padded; later calls overwrite what it writes behind its tokens before they read it.

        Raises:
            BadProgramError: LiteRT cannot run it.
        """
        parts, at = [], 0
        while at < len(tokens):
            room = self.length - start - at
            left = len(tokens) - at
            # LiteRT would silently move a call that reaches beyond the cache to earlier positions.
            size = self.call_length if left > 1 and self.call_length <= room else 1
            new = tokens[at : at + size]
            ids = np.array([new + [0] * (size - len(new))])
            places = start + at + np.arange(size)
            results = self._program.run(PREFILL if size > 1 else DECODE, {TOKENS: ids, PLACES: places, **cache})
            parts.append(results[LOGITS][0, : len(new)].astype(np.float32))
            cache = {name: results[name] for name in self._cache}
            at += len(new)
        return np.concatenate(parts), cache


class TextProgram:
    """A model that reads a whole text in one call, through the shortest signature that has room for it.

    Attributes:
        longest: Most tokens of a text.
        outputs: Names of the outputs.
    """

    def __init__(self, program: Program, family: Family, *, padding: int) -> None:
        """Check the signatures; ``padding`` is the padding token.

        Raises:
            BadProgramError: They are not those of a model that reads a text.
        """
        self._program, self._padding = program, padding
        signatures = {
            shapes["input_ids"][-1]: name
            for name, shapes in program.shapes.items()
            if name.startswith(TEXT) and {"input_ids", "attention_mask"} <= shapes.keys()
        }
        if not signatures:
            raise BadProgramError(f"it lacks signatures {TEXT}N of a model that reads a text")
        self._signatures = dict(sorted(signatures.items()))
        self.longest = max(signatures)
        self.outputs = program.outputs(signatures[self.longest])
        if not set(family.outputs) <= set(self.outputs):
            raise BadProgramError(f"it lacks the outputs of a {family.name}")
        self._per_token = () if family is SEQUENCE_CLASSIFIER else family.outputs

    def run(self, ids: Array, mask: Array, types: Array | None = None) -> dict[str, Array]:
        """Return the outputs for one row of tokens, without those of the padding. Each input: (S).

        Raises:
            BadProgramError: LiteRT cannot run it.
        """
        places = next(size for size in self._signatures if size >= len(ids))
        more = (0, places - len(ids))
        given = {
            "input_ids": np.pad(ids, more, constant_values=self._padding)[None],
            "attention_mask": np.pad(mask, more)[None],
            "token_type_ids": np.pad(np.zeros_like(ids) if types is None else types, more)[None],
        }
        results = self._program.run(self._signatures[places], given)
        return {
            name: (value[:, : len(ids)] if name in self._per_token else value).astype(np.float32)
            for name, value in results.items()
        }


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
