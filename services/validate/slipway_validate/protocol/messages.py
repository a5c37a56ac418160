"""The messages between the stage and a runner process: files in one folder.

The stage writes ``spec.json``. The runner writes logits as ``.npy`` files, and last ``result.json``, which shows that it has
finished. A runner that will be timed then waits for lines on its standard input: for each ``TIME`` it times one round and writes
it as a line of JSON, ``{"round": …}``. A runner that is held imports its libraries, says so, and loads its model after ``BEGIN``.

N = windows, T = tokens per window, P = results per window (T if each token has one), V = values of a result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from slipway.validation.speed import Engine, Memory
from slipway.validation.texts import TextComparison
from slipway_validate.protocol.inputs import Answers, PromptSpec

SPEC_FILE = "spec.json"
RESULT_FILE = "result.json"
LOGITS_FILE = "logits.npy"
"""(N, P, V) float32."""
BEGIN, TIME = "begin", "time"
"""The line that lets a held runner go on, and the one that requests a round of timing."""
IMPORTED, WAITING, ROUND = "imported", "waiting", "round"
"""Keys of a runner's lines: libraries are imported; the result is written and the runner waits; the result of a round."""
SURVIVAL_FILE = "survival.json"
"""What outputs hold of the adapter: an object of :class:`slipway.validation.survival.AdapterSurvival` by name of the output."""
YARDSTICKS_FILE = "yardsticks.json"
"""An object with the passes of :class:`Yardsticks` that were not made, each with the reason; written last."""
BASE_LOGITS_FILE = "base_logits.npy"
"""Like LOGITS_FILE, with the adapter switched off; written by the reference only."""


def case_file(name: str) -> str:
    """Return the file name of a shape case's logits: (positions, V) float32, row by row, without padding."""
    return f"case_{name}.npy"


def plain_file(name: str) -> str:
    """Return the file name of the results of a case's rows, each computed alone without padding; as :func:`case_file`."""
    return f"plain_{name}.npy"


def long_file(index: int) -> str:
    """Return the file name of a long continuation's logits: (tokens, V) float32, each predicting one token of the reference's."""
    return f"long_{index}.npy"


def pass_file(name: str) -> str:
    """Return the file name of the results of a pass of :class:`Yardsticks`: (N, P, V) float32, of its windows."""
    return f"pass_{name.replace('/', '_')}.npy"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CaseRow(_Message):
    """One row of a shape case: the first ``length`` tokens of a window; for an encoder–decoder, of its encoder's input."""

    window: int
    length: int


class Case(_Message):
    """Prefixes of windows, padded to one length L and computed in consecutive segments of columns.

    Attributes:
        name: Name as in :class:`slipway.validation.comparisons.ShapeCase`.
        rows: Rows of the batch.
        segments: Columns per call, with the sum L; every call after the first uses the KV cache.
        padding: Side of the padding.
        plain: Name of the results of each row alone (:func:`plain_file`), for the comparison. Empty: compare with the windows.
        embedding: Whether the compared result of a row is its sentence embedding, one vector of the whole text.
    """

    name: str
    rows: tuple[CaseRow, ...]
    segments: tuple[int, ...]
    padding: Literal["left", "right"] = "left"
    plain: str = ""
    embedding: bool = False


WARM_UP_STEPS = 2
"""Decode steps that are not timed, because earlier work, perhaps of another process, has filled the processor's caches."""


class Benchmark(_Message):
    """The parameters of one round of timing.

    Attributes:
        prefill_tokens: Tokens of the prompt.
        longest_text: Tokens that the model takes, prompt and steps together; a runtime may not know it.
        prefills: Timed passes over the prompt.
        decode_steps: Timed decode steps after it.
        round_seconds: Time after which a round ends, even if it is not complete.
    """

    prefill_tokens: int
    longest_text: int = 1 << 30
    prefills: int = 2
    decode_steps: int
    round_seconds: float = 1.0


class Round(_Message):
    """The result of one round of timing.

    Attributes:
        prefill_tokens: Tokens of the prompt.
        prefill_seconds: Seconds of each timed pass over the prompt.
        decode_seconds: Seconds of each timed decode step; empty without a KV cache.
    """

    prefill_tokens: int
    prefill_seconds: tuple[float, ...]
    decode_seconds: tuple[float, ...] = ()


class LongSpec(_Message):
    """Long greedy continuations to compute.

    Attributes:
        prompts: Token ids of each prompt, the beginning of the window of the same number.
        new_tokens: Tokens to continue each with.
        given: The reference's continuation of each; empty for the reference itself.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    given: tuple[tuple[int, ...], ...] = ()


class LongResult(_Message):
    """Long greedy continuations.

    Attributes:
        continuations: One per prompt.
        cache_divergences: For each, the mean KL of that part in which the logits through the cache differ most from those of one plain pass
            over the same text, nats; None if it is not finite.
        skipped: Why there are none.
    """

    continuations: tuple[tuple[int, ...], ...] = ()
    cache_divergences: tuple[float | None, ...] = ()
    skipped: str = ""


class RunSpec(_Message):
    """One model to run.

    Attributes:
        runtime: ``module:attribute`` of the function that loads the model.
        model: Folder of the model.
        family: Name of its family, in :data:`slipway.model.families.FAMILIES`.
        adapter: Adapter to add to it, unmerged; None for an output, and for a reference without an adapter.
        base: Base model of an output that holds an adapter alone; None for any other.
        samples: Folder of :class:`slipway.proof.runtime.Samples`.
        padding_token: Token that pads a batch.
        threads: Threads that the runtime may use.
        write_logits: Whether logits are compared later; otherwise they are only checked for NaN.
        cases: Shape cases to compute.
        cases_known: Why these shapes are not computed, because the reference's results hold for this model too; empty if they are computed.
        prompts: Prompts of the greedy continuations: token ids.
        new_tokens: Tokens to continue each with.
        drafts: The reference's continuations, which most models write too; empty if every token is computed one by one.
        long: Long continuations; None for none.
        benchmark: Parameters of a round of timing; the process then waits, and times a round at each request. None to measure no speed.
        only_timed: Whether the model is loaded only to be timed.
        texts: File of :class:`slipway_validate.runner.texts.ReadTexts`, for a runtime that reads text itself; None for others.
        held: Whether the process waits for ``BEGIN`` before it loads the model.
        by_layers: Whether a PyTorch model is computed layer by layer, because it does not fit into memory.
        drafting: Whether drafts of the model's multi-token head are compared with what it computes itself.
        pictures: Prompts with a picture that the reference makes for itself and for all outputs; 0 for none, and for outputs.
        asks: Names under which the model only answers the prompt in the folder of the samples; ``base`` is a reference without its adapter. Empty
            for the samples.
    """

    runtime: str
    model: Path
    family: str = "decoder"
    adapter: Path | None = None
    base: Path | None = None
    samples: Path
    padding_token: int = 0
    threads: int = 1
    write_logits: bool = True
    cases: tuple[Case, ...] = ()
    cases_known: str = ""
    prompts: tuple[tuple[int, ...], ...] = ()
    new_tokens: int = 0
    drafts: tuple[tuple[int, ...], ...] = ()
    long: LongSpec | None = None
    benchmark: Benchmark | None = None
    only_timed: bool = False
    texts: Path | None = None
    held: bool = False
    by_layers: bool = False
    drafting: bool = False
    pictures: int = 0
    asks: tuple[str, ...] = ()


class TokenizeSpec(_Message):
    """Text to turn into samples; a runner does it because tokenizers need heavy libraries.

    Attributes:
        tokenizer: Folder with the tokenizer.
        model: Folder with the model's ``config.json`` and, for a speech model, its feature extractor.
        family: Name of its family.
        text: File of documents that :func:`slipway.documents.heldout.read_written` reads.
        windows: Requested windows; a short text gives fewer.
        length: Requested tokens per window.
        seed: Seed of the places of the windows in the text, and of random inputs.
        samples: Folder in which to write :class:`slipway.proof.runtime.Samples`.
        records: File with the user's test inputs, a list in JSON; None if there are none.
        sounds: Folder of the sounds that they name.
    """

    tokenizer: Path
    model: Path
    family: str = "decoder"
    text: Path
    windows: int
    length: int
    seed: int
    samples: Path
    records: Path | None = None
    sounds: Path | None = None


class TextSpec(_Message):
    """Hard texts and conversations for transformers to read.

    Attributes:
        tokenizer, base: Folders of the tokenizer, and of the base, whose chat template serves a tokenizer without one.
        file: File in which to write :class:`slipway_validate.runner.texts.ReadTexts`.
    """

    tokenizer: Path
    base: Path
    file: Path


class ExplainSpec(_Message):
    """An output whose difference from the model its format explains.

    Attributes:
        function: ``module:attribute`` of the format's function.
        output: Folder of the output.
        model: Folder of the merged model or, where the export does not deliver it, of the base.
        exact: Whether the output's weights are the model's; false if that is the base, and there is an adapter.
    """

    function: str
    output: Path
    model: Path
    exact: bool = True


class SurvivalSpec(_Message):
    """Outputs whose stored weights are compared, by name, and the error of a weight above which its nearest rounding is measured too."""

    base: Path
    adapter: Path
    outputs: dict[str, Path]
    largest_errors: dict[str, float]


class Pass(_Message):
    """One pass of the reference's model over windows, with other weights or inputs than its own.

    Attributes:
        name: Its name; that of the output whose weights it computes with.
        output: Folder of the output whose stored weights it computes with; None for the reference's own.
        weights: How the merged weights are rounded (``weight_rounding`` of ``slipway_validate.runner.yardsticks.roundings``); empty: not. With an
            output, only those of parts for images and sound, where the output stores none that are read.
        outer: How the weights of embedding and head are rounded; empty: as the others.
        rounding: How values are rounded while it computes (``slipway.formats.contract.Runtime.rounds``); empty: not.
        halves_encoder: Whether the part for images and sound is then computed in float16.
    """

    name: str
    output: Path | None = None
    weights: str = ""
    outer: str = ""
    rounding: str = ""
    halves_encoder: bool = False


class Yardsticks(_Message):
    """Passes with which outputs are measured.

    Attributes:
        base: Folder of the base.
        adapter: Folder of the adapter; None without one.
        run: Samples, family and padding.
        windows: Number of windows that are computed, from the first.
        threads: Threads to compute with.
        passes: The passes.
        by_layers: Whether the model is computed layer by layer.
    """

    base: Path
    adapter: Path | None = None
    run: RunSpec
    windows: int
    threads: int = 1
    passes: tuple[Pass, ...]
    by_layers: bool = False


class Spec(_Message):
    """Contents of ``spec.json``: at most one of the first five fields. ``survival`` and ``yardsticks`` are done last, after the result is written."""

    run: RunSpec | None = None
    tokenize: TokenizeSpec | None = None
    texts: TextSpec | None = None
    prompt: PromptSpec | None = None
    explain: ExplainSpec | None = None
    yardsticks: Yardsticks | None = None
    survival: SurvivalSpec | None = None


class RunResult(_Message):
    """Contents of ``result.json``.

    Attributes:
        status: ``done``; ``not_run`` if this machine cannot run it; ``failed`` if the model cannot be used.
        reason: Reason of a failure, a key of ``slipway.reasons.REASONS``.
        message: Why it was not run or failed; an explanation that was asked for.
        remedy: What helps, if the run knows it; empty otherwise.
        engine: The engine that ran it.
        vocabulary: Number of values of a result, V.
        source: For samples: description of inputs that are not windows of text.
        non_finite: Number of all computed logits that are NaN or infinite (without padding).
        first_non_finite: Description of the place of the first of them.
        skipped_cases: Names of cases that do not apply, with the reason.
        continuations: Greedy continuations, one per prompt.
        long: Long continuations; None if none were asked for.
        answers: Answers to the user's test inputs; None if there are none.
        texts: How its runtime reads text; None if it reads none.
        architecture: Class of the model, if known.
        adapter: For the reference: description of its adapter.
        device: The device that computed it: ``cpu`` or the GPU's name.
        by_layers: For the reference: why it was computed layer by layer, and what was not run; empty if it was computed as a whole.
    """

    status: Literal["done", "not_run", "failed"] = "done"
    reason: str = ""
    message: str = ""
    remedy: str = ""
    engine: Engine | None = None
    vocabulary: int = 0
    source: str = ""
    load_seconds: float | None = None
    memory: Memory | None = None
    non_finite: int = 0
    first_non_finite: str = ""
    skipped_cases: dict[str, str] = {}
    continuations: tuple[tuple[int, ...], ...] = ()
    long: LongResult | None = None
    answers: Answers | None = None
    texts: TextComparison | None = None
    architecture: str = ""
    adapter: str = ""
    device: str = ""
    by_layers: str = ""
