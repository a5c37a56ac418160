"""Prepare the samples of a validation from its text, and the spec of each model's run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipway.documents import heldout as texts
from slipway.errors import ModelExportError, StageError, ValidationError
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, FEATURE_EXTRACTION, Comparison, Family
from slipway.model.folder import ModelFolder
from slipway.model.model_files import CONFIG, copy_companions
from slipway.model.sentences import UnknownPoolingError, read_pooling
from slipway.model.trained import trained_model
from slipway.proof.runtime import OWN_FILE, Samples
from slipway.proof.sounds import is_known_type
from slipway.stage import Context
from slipway.validation.findings import ValidationInputs
from slipway.validation.inputs import TEST_INPUTS
from slipway.validation.pictures import Sense
from slipway_validate.answers.own_text import write_own_text
from slipway_validate.answers.records import choose_records, write_records
from slipway_validate.cases import DEFAULT_VOCABULARY, MIN_LENGTH, longest_text, shape_cases, size_of, values_per_token
from slipway_validate.params import SampleParams, ValidateParams
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import (
    WARM_UP_STEPS,
    Benchmark,
    LongSpec,
    RunResult,
    RunSpec,
    Spec,
    TokenizeSpec,
)
from slipway_validate.protocol.pictures import PICTURE_TOKENS

LOGIT_FILES = 4
"""Sets of logits on disk at the same time: reference, base, merged model and the current output."""
PROMPT_TOKENS = 16
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

LEAST_TOKENS = 16
"""Fewest tokens of a long continuation; the greedy continuations cover shorter ones."""
_FILES = 2
"""Files of results that lie on the disk at once: the reference's and an output's."""


@dataclass(frozen=True)
class Prepared:
    """The samples of a validation and their origin.

    Attributes:
        family: The model's family.
        text: The text of the samples.
        source: Description of inputs that replace text; empty if there are none.
        folder: Folder of the samples.
        samples: The samples that every model computes.
        padding_token: Token that pads a batch.
        tokenizer: Folder of the tokenizer.
        embeds: Whether the model is a sentence encoder of a known pooling.
    """

    family: Family
    text: texts.HeldOutText
    source: str
    folder: Path
    samples: Samples
    padding_token: int
    tokenizer: Path
    embeds: bool = False

    def prompts(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Return the beginnings of the first windows; for an encoder–decoder, the decoder's first token."""
        if not self.family.generates:
            return ()
        tokens = self.samples.tokens
        length = min(PROMPT_TOKENS, tokens.shape[1]) if self.samples.source is None else 1
        return tuple(tuple(int(token) for token in row[:length]) for row in tokens[:count])

    def spec(
        self,
        runtime: str,
        model: Path,
        *,
        params: SampleParams,
        threads: int,
        compare: bool = True,
        benchmark: Benchmark | None = None,
    ) -> RunSpec:
        """Return the spec of a model's run."""
        every, count = params.evidence.every_case, self.samples.tokens.shape
        return RunSpec(
            runtime=runtime,
            model=model.absolute(),
            family=self.family.name,
            samples=self.folder.absolute(),
            padding_token=self.padding_token,
            threads=threads,
            write_logits=compare,
            cases=shape_cases(self.family, *count, embedding=self.embeds, every=every) if compare else (),
            prompts=self.prompts(params.prompts) if compare else (),
            new_tokens=params.max_new_tokens,
            benchmark=benchmark,
        )

    def describe(self, params: ValidateParams, *, vocabulary: int) -> ValidationInputs:
        """Describe the inputs for the report."""
        samples, length = self.samples.tokens.shape
        return ValidationInputs(
            samples=samples,
            sequence_length=length,
            tokens=samples * length,
            requested_samples=params.windows,
            vocabulary=vocabulary,
            family=self.family.name,
            comparison=self.family.comparison.value,
            seed=params.seed,
            prompts=len(self.prompts(params.prompts)) if params.compare_outputs else 0,
            new_tokens=params.max_new_tokens,
            text_source="; ".join(filter(None, (self.text.source, self.source))),
            held_out=self.text.held_out,
            text_files=self.text.files,
            tokens_sha256=hashlib.sha256(self.samples.tokens.astype("<i8").tobytes()).hexdigest(),
            effort=params.effort,
            effort_difference=params.evidence.difference,
        )


def benchmark_of(params: ValidateParams, config: ModelConfig, family: Family) -> Benchmark | None:
    """Return the parameters of a round of timing; None if speed is not measured.

    Where a model takes short texts only, the prompt leaves room for the steps after it.
    """
    if not params.benchmark_performance:
        return None
    longest, steps = longest_text(config, family), min(params.benchmark_decode_steps, params.evidence.most_steps)
    room = longest - steps - WARM_UP_STEPS if family.generates else longest
    return Benchmark(
        prefill_tokens=min(params.sequence_length, max(room, longest // 2, 1)),
        longest_text=longest,
        prefills=params.evidence.prefills,
        decode_steps=steps,
        round_seconds=params.benchmark_seconds / (2 * params.benchmark_repeats),
    )


def open_models(inputs: Mapping[str, Path], work: Path) -> tuple[ModelFolder, ModelFolder]:
    """Return the base, and the model that the adapter was trained on, with its configuration and tokenizer.

    The two are one unless the adapter brings a head that makes it a model of another class.
    """
    try:
        base = ModelFolder.open(inputs["base"])
        trained = trained_model(base, inputs["adapter"]) if "adapter" in inputs else None
    except ModelExportError as error:
        remedy = error.remedy or "give the folder of a whole model"
        raise ValidationError(
            f"the base model cannot be used: {error.message}", reason="VALIDATION_IMPOSSIBLE", remedy=remedy
        ) from error
    if trained is None:
        return base, base
    folder = work / "trained"
    folder.mkdir()
    copy_companions(base.path, folder)
    (folder / CONFIG).write_text(json.dumps(dict(trained.config)), encoding="utf-8")
    return base, ModelFolder(folder, trained.config)


def prepare(
    inputs: Mapping[str, Path], model: ModelFolder, family: Family, params: SampleParams, ctx: Context, *, work: Path
) -> Prepared:
    """Choose the text and make samples from it for the model that the adapter was trained on.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: no tokenizer or feature extractor, or too little text.
        StageError: ``CANCELLED``, ``DISK_FULL``.
    """
    text = texts.read_held_out(inputs["heldout"]) if "heldout" in inputs else texts.built_in_text()
    folder = work / "samples"
    tokenizer = tokenizer_folder(inputs, model)
    answered = choose_records(inputs, model.config, family, params, warn=ctx.warn)
    records = write_records(answered, work / "records.json")
    write_own_text(inputs, answered, model.config, family, work / OWN_FILE, seed=params.seed, warn=ctx.warn)
    windows, length = _affordable(model.config, family, params)
    spec = TokenizeSpec(
        tokenizer=tokenizer.absolute(),
        model=model.path.absolute(),
        family=family.name,
        text=text.write(work / "documents.jsonl").absolute(),
        windows=windows,
        length=length,
        seed=params.seed,
        samples=folder.absolute(),
        records=records,
        sounds=inputs[TEST_INPUTS].absolute() if TEST_INPUTS in inputs else None,
    )
    timeout = params.output_timeout_seconds
    result = process.run(Spec(tokenize=spec), work / "tokenize", ctx, label="tokenize", timeout_seconds=timeout)
    require_success(
        result,
        what="the text cannot be tokenized",
        remedy="give the files of its tokenizer and feature extractor beside the base model",
    )
    samples = Samples.read(folder)
    count = len(samples.tokens)
    if count < params.windows:
        ctx.warn(f"only {count} of {params.windows} test samples: more do not fit the text or max_logit_bytes")
    padding = padding_token(model.config, family)
    return Prepared(
        family, text, result.source, folder, samples, padding, tokenizer, embeds=_embeds(inputs, family, ctx)
    )


def _embeds(inputs: Mapping[str, Path], family: Family, ctx: Context) -> bool:
    try:
        return family is FEATURE_EXTRACTION and read_pooling(inputs.get("adapter"), inputs["base"]) is not None
    except UnknownPoolingError as error:
        ctx.warn(f"sentence embeddings were not compared: {error}")
        return False


def unknown_family(config: ModelConfig) -> str:
    """Return why a model of this configuration, of no known family, is not validated."""
    return f"the family of {config.description} is unknown to the validation, so it was not run"


def require_success(result: RunResult, *, what: str, remedy: str) -> None:
    """Raise if a run that all others depend on did not succeed.

    Raises:
        ValidationError: With the run's own reason.
        StageError: ``DISK_FULL``.
    """
    if result.reason == "DISK_FULL":
        raise StageError(f"no space left for logits: {result.message}", reason="DISK_FULL")
    if result.status != "done":
        reason = result.reason or "VALIDATION_IMPOSSIBLE"
        if result.remedy:  # the run knows what is at fault
            raise ValidationError(result.message, reason=reason, remedy=result.remedy)
        raise ValidationError(f"{what}: {result.message}", reason=reason, remedy=remedy)


def decoder(tokenizer_folder: Path) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text, which reads only the fast tokenizer's file; without a usable file it returns no text."""
    path = tokenizer_folder / "tokenizer.json"
    if not path.is_file():
        return lambda _: ""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - the library raises no other class; a slow tokenizer never reads this file
        return lambda _: ""

    def decode(ids: Sequence[int]) -> str:
        try:
            return str(tokenizer.decode(list(ids), skip_special_tokens=False))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001 - a panic of tokenizers is no Exception
            return ""

    return decode


def tokenizer_folder(inputs: Mapping[str, Path], model: ModelFolder) -> Path:
    """Return the adapter's folder if it has a tokenizer, which may have added tokens; otherwise the model's."""
    adapter = inputs.get("adapter")
    whole = adapter is not None and all((adapter / name).is_file() for name in TOKENIZER_FILES)
    return adapter if adapter is not None and whole else model.path


def padding_token(config: ModelConfig, family: Family) -> int:
    """Return the token that pads a batch; a decoder reads the mask, so it accepts any. A token that does not exist becomes 0."""
    token = 0 if family.comparison is Comparison.NEXT_TOKEN else size_of(config, "pad_token_id")
    return token if token < (size_of(config, "vocab_size") or DEFAULT_VOCABULARY) else 0


def _affordable(config: ModelConfig, family: Family, params: SampleParams) -> tuple[int, int]:
    """Return the number of windows and of tokens per window whose results stay within ``max_logit_bytes``."""
    longest = min(longest_text(config, family), params.longest_text or 1 << 30)
    values = values_per_token(config.text, family)
    tokens = params.logit_bytes // (LOGIT_FILES * values * 4)
    beside = PICTURE_TOKENS * len(expected_senses(config, family)) * count_pictures(config, family, params)
    tokens = max(MIN_LENGTH, tokens - beside)
    length = max(MIN_LENGTH, min(params.sequence_length, longest, tokens))
    return max(1, min(params.windows, tokens // length)), length


def expected_senses(config: ModelConfig, family: Family) -> tuple[Sense, ...]:
    """Return what the reference is asked to compute beside text: of a decoder that takes images or sound and is loaded with the part for them.

    A model that takes sound in a way that is not known here is asked for pictures, and says why there are none.
    """
    sees, hears = (config.get(name) is not None for name in ("vision_config", "audio_config"))
    whole = config.class_name.endswith("ForConditionalGeneration")
    if family is not DECODER or not whole or not (sees or hears):
        return ()
    hears = hears and is_known_type(config.get("model_type"))
    return (*((Sense.PICTURES,) if sees or not hears else ()), *((Sense.SOUND,) if hears else ()))


def count_pictures(config: ModelConfig, family: Family, params: SampleParams) -> int:
    """Return the number of prompts with a picture, and of those with sound, each of whose results stay within an eighth of ``max_logit_bytes``; 0 for a model of text."""
    if not expected_senses(config, family):
        return 0
    each = LOGIT_FILES * values_per_token(config.text, family) * 4 * PICTURE_TOKENS
    return min(params.evidence.pictures, params.logit_bytes // (8 * each))


def long_spec(
    prepared: Prepared, config: ModelConfig, params: SampleParams, *, reference: RunResult | None = None
) -> LongSpec | None:
    """Return the long continuations to compute; None if none are asked for or the model is too small for them.

    Args:
        prepared: The samples.
        config: The model's configuration.
        params: Parameters of the stage.
        reference: The reference's result, whose continuations outputs compute too; None for the reference itself.
    """
    if not params.continuation_tokens:
        return None
    prompts = prepared.prompts(params.continuation_prompts)
    room = longest_text(config, prepared.family) - max(map(len, prompts), default=0)
    values = values_per_token(config.text, prepared.family) * np.dtype(np.float32).itemsize
    affordable = params.logit_bytes // (_FILES * values * max(1, len(prompts)))
    count = min(params.continuation_tokens, room, affordable)
    if not prompts or count < LEAST_TOKENS:
        return None
    given = reference.long.continuations if reference is not None and reference.long is not None else ()
    return LongSpec(prompts=prompts, new_tokens=count, given=given)
