"""Load a program into LiteRT's interpreter, and run its signatures one row at a time.

Axes: S = tokens of a call, P = places of a signature, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter

from slipway.model.families import SEQUENCE_CLASSIFIER, Family
from slipway_litert.params import DECODE, KEYS, LOGITS, PLACES, PREFILL, TEXT, TOKENS, VALUES

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
