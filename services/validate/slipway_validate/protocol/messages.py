"""What the stage tells a runner process to do, and what the runner answers: files in one folder.

The stage writes ``spec.json``; the runner writes logits as ``.npy`` files and last ``result.json``, whose presence means
that it finished. A runner that is to be timed then waits for lines on its standard input: ``TIME`` takes one round, which it writes
as a line of JSON, ``{"round": …}``. N = windows, T = tokens per window, P = results per window (T where each token has one), V = values of a result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from slipway.validation.speed import Engine, Memory

SPEC_FILE = "spec.json"
RESULT_FILE = "result.json"
LOGITS_FILE = "logits.npy"
"""(N, P, V) float32."""
TIME = "time"
"""The line that asks for a round of timing."""
WAITING, ROUND = "waiting", "round"
"""Keys of a runner's lines: its result is written and it waits; what a round gave."""
BASE_LOGITS_FILE = "base_logits.npy"
"""As LOGITS_FILE, with the adapter switched off; written by the reference only."""


def case_file(name: str) -> str:
    """Logits of a shape case: (positions, V) float32, row by row of the case, padding left out."""
    return f"case_{name}.npy"


def plain_file(name: str) -> str:
    """Results of a case's rows, each computed alone and without padding; as :func:`case_file`."""
    return f"plain_{name}.npy"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CaseRow(_Message):
    """One row of a shape case: the first ``length`` tokens of a window; of an encoder–decoder, of what its encoder reads."""

    window: int
    length: int


class Case(_Message):
    """Prefixes of windows, padded to one length L and computed in consecutive segments of columns.

    Attributes:
        name: As in :class:`slipway.validation.comparisons.ShapeCase`.
        rows: The batch.
        segments: Columns computed per call, summing to L; every call after the first uses the KV cache.
        padding: On which side.
        plain: Name of the results to compare with: those of each row alone (:func:`plain_file`). Empty: those of the windows.
    """

    name: str
    rows: tuple[CaseRow, ...]
    segments: tuple[int, ...]
    padding: Literal["left", "right"] = "left"
    plain: str = ""


class Benchmark(_Message):
    """What one round of timing is.

    Attributes:
        prefill_tokens: Tokens of the prompt.
        prefills: Timed passes over it.
        decode_steps: Timed decode steps behind it.
        round_seconds: When a round ends, however little was timed.
    """

    prefill_tokens: int
    prefills: int = 2
    decode_steps: int
    round_seconds: float = 1.0


class Round(_Message):
    """What one round of timing gave.

    Attributes:
        prefill_tokens: Tokens of the prompt.
        prefill_seconds: Of each timed pass over the prompt.
        decode_seconds: Of each timed decode step; empty without a KV cache.
    """

    prefill_tokens: int
    prefill_seconds: tuple[float, ...]
    decode_seconds: tuple[float, ...] = ()


class RunSpec(_Message):
    """One model to run.

    Attributes:
        runtime: ``module:attribute`` of the function that loads the model.
        model: Folder of the model.
        family: Name of its family, in :data:`slipway.models.families.FAMILIES`.
        adapter: Adapter to put on it, unmerged; None for an output, and for a reference without one.
        samples: Folder of :class:`slipway_validate.samples.Samples`.
        padding_token: Token that pads a batch.
        threads: Threads the runtime may use.
        batch_values: Logits that one call may return at most (bounds memory); at least one window is computed.
        write_logits: Whether logits are compared later; otherwise they are only looked at for NaN.
        cases: Shape cases to compute.
        prompts: Prompts of the greedy continuations: token ids.
        new_tokens: Tokens to continue each with.
        benchmark: What a round of timing is; the process then stays, and takes a round whenever it is told. None when speed is
            not measured.
    """

    runtime: str
    model: Path
    family: str = "decoder"
    adapter: Path | None = None
    samples: Path
    padding_token: int = 0
    threads: int = 1
    batch_values: int = 1 << 24
    write_logits: bool = True
    cases: tuple[Case, ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ()
    new_tokens: int = 0
    benchmark: Benchmark | None = None


class TokenizeSpec(_Message):
    """Text to make samples of, done by a runner because tokenizers come with heavy libraries.

    Attributes:
        tokenizer: Folder with the tokenizer.
        model: Folder with the model's ``config.json`` and, of a model of speech, its feature extractor.
        family: Name of its family.
        text: UTF-8 text file.
        windows: Windows wanted; fewer when the text is short.
        length: Tokens per window wanted.
        seed: Places the windows in the text, and draws what is not text.
        samples: Folder to write: :class:`slipway_validate.samples.Samples`.
    """

    tokenizer: Path
    model: Path
    family: str = "decoder"
    text: Path
    windows: int
    length: int
    seed: int
    samples: Path


class Spec(_Message):
    """Contents of ``spec.json``: exactly one of the two."""

    run: RunSpec | None = None
    tokenize: TokenizeSpec | None = None


class RunResult(_Message):
    """Contents of ``result.json``.

    Attributes:
        status: ``done``; ``not_run`` when this machine cannot run it; ``failed`` when the model cannot be used.
        reason: Of a failure, a key of ``slipway.reasons.REASONS``.
        message: Why not run or failed, in words.
        engine: What ran it.
        vocabulary: V.
        source: What was made beside the windows of text, in words; of samples.
        non_finite: Logits that are NaN or infinite, over everything computed (padding left out).
        first_non_finite: Where the first of them was seen, in words.
        skipped_cases: Names of cases that do not apply, with why.
        continuations: Greedy continuations, one per prompt.
        architecture: Class of the model, where known.
        adapter: The adapter in words, of the reference.
        device: What computed it: ``cpu`` or the GPU's name.
    """

    status: Literal["done", "not_run", "failed"] = "done"
    reason: str = ""
    message: str = ""
    engine: Engine | None = None
    vocabulary: int = 0
    source: str = ""
    load_seconds: float | None = None
    memory: Memory | None = None
    non_finite: int = 0
    first_non_finite: str = ""
    skipped_cases: dict[str, str] = {}
    continuations: tuple[tuple[int, ...], ...] = ()
    architecture: str = ""
    adapter: str = ""
    device: str = ""
