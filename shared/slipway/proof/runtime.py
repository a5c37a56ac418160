"""The interface of a runtime's models, padded batches for them, and the samples of a validation.

Axes of calls: B = batch, S = tokens of this call, P = tokens already in the KV cache, V = values of a result (for next tokens, the
vocabulary).

Samples are the inputs that all models of one validation get, kept as arrays in one folder. Their axes: N = samples, T = tokens of
one, S = tokens that the encoder of an encoder–decoder reads, P = compared results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from slipway.errors import CheckpointValidationError
from slipway.model.configuration import ModelConfig
from slipway.model.families import Family
from slipway.proof.numerics import Ints, Logits
from slipway.proof.sights import Sight
from slipway.validation.speed import Engine

OWN_FILE, OWN_FOLDER, EVIDENCE_FILE = "own_text.json", "own_text", "own_evidence.json"
"""File of the texts to judge the adapter on, beside the text of the samples; folder of their samples, beside the samples' folder; and file of
what was measured on them, in the folder of the run."""
HEAD_FILE = "multi_token_head.json"
"""There too, what the reference accepts of the drafts of its multi-token head: a :class:`slipway.validation.parts.MultiTokenHead`."""
Values = npt.NDArray[Any]
"""Token ids (B, S), features of sound (B, F, frames), or samples of sound (B, S)."""

PAST_PREFIX, PRESENT_PREFIX = "past_key_values.", "present."
"""Prefixes of the names of a graph's cache inputs and cache outputs."""

Past = Any
"""A runtime's own KV cache; None is an empty one."""
T = TypeVar("T")
NOT_BY_LAYERS = "the model is computed layer by layer, and its part for images and sound is not"


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs and labels of all samples.

    Attributes:
        tokens: Input of a decoder or an encoder, (N, T); for an encoder–decoder, the decoder's input.
        source: Input of the encoder of an encoder–decoder: token ids (N, S), features of sound (N, F, frames) or its samples (N, S).
        positions: Tokens whose results are compared, (N, P); None means all.
        labels: The token that each result predicts, (N, P); None if results predict no tokens.
    """

    tokens: Ints
    source: Values | None = None
    positions: Ints | None = None
    labels: Ints | None = None

    def write(self, folder: Path) -> None:
        """Write them into a new folder."""
        folder.mkdir(parents=True)
        for each in fields(self):
            if (values := getattr(self, each.name)) is not None:
                np.save(folder / f"{each.name}.npy", values)

    @classmethod
    def read(cls, folder: Path) -> Samples:
        """Read samples written by :meth:`write`."""
        paths = {each.name: folder / f"{each.name}.npy" for each in fields(cls)}
        return cls(**{name: np.load(path) for name, path in paths.items() if name == "tokens" or path.is_file()})


class NotRunnable(Exception):  # noqa: N818 - a finding about this machine, not an error
    """This machine cannot run the output; the message says why and what is needed."""


class Unusable(Exception):  # noqa: N818 - becomes a typed failure in the runner
    """The output's files are not a model that can be run; the message says what is wrong."""


class UnplacedTensors(Unusable):
    """Tensors of the adapter have no place in the reference, so that it would be another model than was trained."""


class UnusableInput(Unusable):
    """One of the user's test inputs cannot be given to the model; the message says which and why."""


def read_config(folder: Path) -> tuple[ModelConfig, Family]:
    """Return the configuration and the family of an output.

    Raises:
        Unusable: Its configuration cannot be read, or no family fits it.
    """
    try:
        config = ModelConfig.read(folder)
    except CheckpointValidationError as error:
        raise Unusable(f"its config.json cannot be read: {error.message}") from error
    return config, known_family(config, folder)


def known_family(config: ModelConfig, folder: Path) -> Family:
    """Return the family of an output with this configuration.

    Raises:
        Unusable: It is not known.
    """
    if config.family is None:
        raise Unusable(f"{folder.name!r} is {config.description}, whose family is unknown")
    return config.family


@dataclass(frozen=True, slots=True)
class Source:
    """The input of the encoder of an encoder–decoder.

    Attributes:
        values: Token ids (B, S), features of sound (B, F, frames) or its samples (B, S).
        mask: 1 for a token or sample and 0 for padding, (B, S); None for features, which have one length only.
    """

    values: Values
    mask: Ints | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One call. input_ids, position_ids: (B, S); attention_mask: (B, P + S), 1 for a token and 0 for padding.

    For an encoder–decoder these are the decoder's inputs, and ``source`` is the encoder's. With ``last_only``, only results of the
    last column are read, and a model need not return others. With ``final``, no later call reads the cache of this one.
    """

    input_ids: Ints
    attention_mask: Ints
    position_ids: Ints
    past: Past = None
    source: Source | None = None
    last_only: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest shapes that a runtime accepts; engines built for fixed profiles have them."""

    batch: int = 1 << 30
    sequence: int = 1 << 30
    past: int = 1 << 30


class LanguageModel(Protocol):
    """A model that gives results for a batch of token sequences; the defaults are those of fixed arithmetic on the CPU.

    Attributes:
        engine: The engine that runs it.
        native_dtype: Data type in which it computes when served.
        device: ``cpu``, or the GPU's name.
        has_cache: Whether it accepts and returns a KV cache.
        bounds: Largest shapes that it accepts.
        architecture: Class of the model, empty when unknown.
        embeds: Whether it gives the sentence embedding of a text. None: its runtime has no such result.
        hears: Whether it takes sound beside text.
        reads_text: Whether its runtime reads text and conversations with a tokenizer and chat template of the output itself.
        preparation_seconds: Time that loading took for what its users have already, such as a file of the base model.
    """

    engine: Engine
    native_dtype: str
    device: str = "cpu"
    has_cache: bool
    bounds: Bounds
    architecture: str = ""
    embeds: bool | None = None
    hears: bool = False
    reads_text: bool = False
    preparation_seconds: float = 0.0

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """Return results in float32, and the cache extended by this call's tokens.

        Results are (B, S, V), one per token, or (B, P, V) if they describe a whole row: the classes of a text (P = 1), or the
        start and end of a span (P = 2, V = S).
        """
        ...

    def together(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run jobs that call the model, and return their results in order; a model that is larger than the memory computes them side by side."""
        return [job() for job in jobs]

    def watch_layers(self, report: Callable[[int, int], None]) -> None:  # noqa: ARG002 - runtimes that compute so replace it
        """Have it told how many layers were computed in all passes so far, and how many are in one; for a model computed layer by layer.

        Raises:
            Unusable: Its runtime computes none so.
        """
        raise Unusable(f"{self.engine.runtime} computes no model layer by layer")

    def embed(self, step: Step) -> Logits:
        """Return the sentence embedding of each row, (B, 1, V); only for a model that embeds."""
        raise Unusable(f"its runtime gives no sentence embedding of {len(step.input_ids)} texts")

    def look(self, sight: Sight) -> Logits:  # noqa: ARG002 - runtimes that take pictures replace it
        """Return results of the tokens behind a picture, (S, V).

        Raises:
            NotRunnable: Its runtime, or this output, takes no pictures; the message says why. Nothing is known to be wrong.
            Unusable: It should take them, and cannot.
        """
        raise NotRunnable(f"{self.engine.runtime} is given no pictures here")

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a text, special tokens in it and around it included; only for a runtime that reads text."""
        raise Unusable(f"its runtime reads no text, such as {text[:20]!r}")

    def rendered(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        options: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Return the prompt for the next turn of a conversation; None if the output has no chat template.

        ``options`` are what the template is given beside messages and tools, such as ``enable_thinking``.
        """
        raise Unusable(
            f"its runtime renders no conversation, such as one of {len(messages)} turns with {len(tools)} tools "
            f"and {len(options or {})} options"
        )

    def text_differences(self) -> tuple[str, ...]:
        """Return the kinds of text (``slipway.validation.texts.TextKind``) that the output's runtime is known to split otherwise."""
        return ()

    def prepare_comparison(self) -> None:
        """Switch to the arithmetic in which logits are compared: float32 if the runtime allows a choice."""
        return

    def leave_comparison(self) -> None:
        """Switch back to the arithmetic in which it is served."""
        return

    def peak_device_bytes(self) -> int | None:
        """Return the largest GPU memory used so far, None on the CPU."""
        return None


def class_results(logits: Logits, *, several_labels: bool) -> Logits:
    """Return a classifier's logits as results: (B, 1, C), (B, S, C), or (B, C, 2) for several labels at once, yes and no."""
    if several_labels:
        flat = logits.reshape(len(logits), -1)
        return np.stack([flat, np.zeros_like(flat)], axis=-1)
    return logits if logits.ndim == 3 else logits[:, None]


def plain_step(tokens: list[int], *, past: Past, past_length: int, source: Source | None = None) -> Step:
    """Return the step of one unpadded row of tokens after ``past_length`` cached ones, of which the last token's results are read."""
    total = past_length + len(tokens)
    return Step(
        input_ids=np.array([tokens], dtype=np.int64),
        attention_mask=np.ones((1, total), dtype=np.int64),
        position_ids=np.arange(past_length, total, dtype=np.int64)[None],
        past=past,
        source=source,
        last_only=True,
    )


def padded(rows: list[Ints], *, side: str, token: int) -> tuple[Ints, Ints]:
    """Pad token rows of different lengths on a side with a token into one batch: ids (B, L) and mask (B, L)."""
    longest = max(len(row) for row in rows)
    ids = np.full((len(rows), longest), token, dtype=np.int64)
    mask = np.zeros_like(ids)
    for index, row in enumerate(rows):
        columns = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[index, columns] = row
        mask[index, columns] = 1
    return ids, mask


def positions_of(mask: Ints) -> Ints:
    """Return position ids of a padded batch: tokens are counted from 0, padding has position 0. (B, L) -> (B, L)."""
    return np.maximum(np.cumsum(mask, axis=1) - 1, 0)


def run_segments(
    model: LanguageModel, ids: Ints, mask: Ints, segments: tuple[int, ...], *, source: Source | None = None
) -> Iterator[tuple[slice, Logits]]:
    """Compute columns segment by segment through the cache. ids, mask: (B, L); yields columns and results (B, S, V)."""
    positions = positions_of(mask)
    past: Past = None
    start = 0
    for size in segments:
        columns = slice(start, start + size)
        final = columns.stop >= sum(segments)
        step = Step(ids[:, columns], mask[:, : columns.stop], positions[:, columns], past, source, final=final)
        logits, past = model.forward(step)
        yield columns, logits
        start += size


def segments_within(length: int, bounds: Bounds) -> tuple[int, ...]:
    """Split ``length`` columns into calls that the runtime accepts."""
    size = min(length, bounds.sequence)
    return tuple(min(size, length - start) for start in range(0, length, size))


def source_of(samples: Samples, windows: list[int]) -> Source | None:
    """Return the encoder's input for these windows, without padding; None without a separate encoder."""
    if samples.source is None:
        return None
    return whole_source(samples.source[windows])


def whole_source(values: Values) -> Source:
    """Return an encoder's input without padding."""
    return Source(values, np.ones(values.shape, np.int64) if values.ndim == 2 else None)
