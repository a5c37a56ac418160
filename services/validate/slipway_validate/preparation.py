"""The text of a validation as windows of tokens, and what every model is asked to compute with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipway.errors import StageError, ValidationError
from slipway.stage import Context
from slipway.validation.findings import ValidationInputs
from slipway_validate import texts
from slipway_validate.cases import shape_cases
from slipway_validate.folders import read_json
from slipway_validate.numerics import Ints
from slipway_validate.params import ValidateParams
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import Benchmark, RunResult, RunSpec, Spec, TokenizeSpec

LOGIT_FILES = 4
"""On disk at once: reference, base, merged, and the output at hand."""
DEFAULT_VOCABULARY = 1 << 18
PROMPT_TOKENS = 16
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Prepared:
    """Windows and prompts.

    Attributes:
        text: Where they come from.
        file: ``.npy`` file of the windows.
        tokens: The windows, (N, T).
        tokenizer: Folder of the tokenizer.
    """

    text: texts.HeldOutText
    file: Path
    tokens: Ints
    tokenizer: Path

    def prompts(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Beginnings of the first windows."""
        length = min(PROMPT_TOKENS, self.tokens.shape[1])
        return tuple(tuple(int(token) for token in row[:length]) for row in self.tokens[:count])

    def spec(self, runtime: str, model: Path, *, params: ValidateParams, threads: int) -> RunSpec:
        """What a model is asked to compute."""
        compare = params.compare_outputs
        benchmark = Benchmark(
            prefill_tokens=params.sequence_length,
            decode_steps=params.benchmark_decode_steps,
            round_seconds=params.benchmark_seconds / (2 * params.benchmark_repeats),
        )
        return RunSpec(
            runtime=runtime,
            model=model.absolute(),
            tokens=self.file.absolute(),
            threads=threads,
            write_logits=compare,
            cases=shape_cases(*self.tokens.shape),
            prompts=self.prompts(params.greedy_prompts) if compare else (),
            new_tokens=params.max_new_tokens,
            benchmark=benchmark if params.benchmark_performance else None,
        )

    def described(self, params: ValidateParams, *, vocabulary: int) -> ValidationInputs:
        """For the report."""
        samples, length = self.tokens.shape
        return ValidationInputs(
            samples=samples,
            sequence_length=length,
            tokens=samples * length,
            requested_samples=params.test_samples,
            vocabulary=vocabulary,
            seed=params.seed,
            prompts=min(params.greedy_prompts, samples) if params.compare_outputs else 0,
            new_tokens=params.max_new_tokens,
            text_source=self.text.source,
            held_out=self.text.held_out,
            text_files=self.text.files,
            tokens_sha256=hashlib.sha256(self.tokens.astype("<i8").tobytes()).hexdigest(),
        )


def prepare(inputs: Mapping[str, Path], params: ValidateParams, ctx: Context, *, work: Path) -> Prepared:
    """Choose the text and cut it into windows.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: no tokenizer, or too little text.
        StageError: ``CANCELLED``, ``DISK_FULL``.
    """
    text = texts.held_out(inputs["heldout"]) if "heldout" in inputs else texts.built_in()
    text_file, tokens_file = work / "text.txt", work / "tokens.npy"
    text_file.write_text(text.text, encoding="utf-8")
    tokenizer = _tokenizer_folder(inputs)
    windows, length = _affordable(inputs["base"], params)
    spec = TokenizeSpec(
        tokenizer=tokenizer.absolute(),
        text=text_file.absolute(),
        windows=windows,
        length=length,
        seed=params.seed,
        tokens=tokens_file.absolute(),
    )
    timeout = params.output_timeout_seconds
    result = process.run(Spec(tokenize=spec), work / "tokenize", ctx, label="tokenize", timeout_seconds=timeout)
    require(result, what="the text cannot be tokenized", remedy="give the tokenizer's files beside the base model")
    tokens: Ints = np.load(tokens_file)
    if len(tokens) < params.test_samples:
        ctx.warn(
            f"only {len(tokens)} of {params.test_samples} test samples: more do not fit the text or max_logit_bytes"
        )
    return Prepared(text, tokens_file, tokens, tokenizer)


def require(result: RunResult, *, what: str, remedy: str) -> None:
    """Raise when a run that everything depends on did not succeed.

    Raises:
        ValidationError: With the run's own reason.
        StageError: ``DISK_FULL``.
    """
    if result.reason == "DISK_FULL":
        raise StageError(f"no space left for logits: {result.message}", reason="DISK_FULL")
    if result.status != "done":
        reason = result.reason or "VALIDATION_IMPOSSIBLE"
        raise ValidationError(f"{what}: {result.message}", reason=reason, remedy=remedy)


def decoder(prepared: Prepared) -> Callable[[Sequence[int]], str]:
    """Token ids to text, by the fast tokenizer's file alone; to nothing when there is no such file."""
    path = prepared.tokenizer / "tokenizer.json"
    if not path.is_file():
        return lambda _: ""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _tokenizer_folder(inputs: Mapping[str, Path]) -> Path:
    """The adapter's, which may have added tokens, if it has one; otherwise the base's."""
    adapter = inputs["adapter"]
    return adapter if all((adapter / name).is_file() for name in TOKENIZER_FILES) else inputs["base"]


def _affordable(base: Path, params: ValidateParams) -> tuple[int, int]:
    """Windows and tokens per window whose logits stay within ``max_logit_bytes``."""
    config = read_json(base / "config.json")
    config = config.get("text_config", config)
    vocabulary = int(config.get("vocab_size") or DEFAULT_VOCABULARY)
    longest = int(config.get("max_position_embeddings") or params.sequence_length)
    tokens = max(8, params.max_logit_bytes // (LOGIT_FILES * vocabulary * 4))
    length = max(8, min(params.sequence_length, longest, tokens))
    return max(1, min(params.test_samples, tokens // length)), length
