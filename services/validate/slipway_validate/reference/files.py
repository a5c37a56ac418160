"""Write and read the folder of a reference: samples, results and figures, which every validation of the adapter uses.

``reference.json`` holds a :class:`ReferenceFile`, ``samples/`` the inputs of all models, and ``.npy`` files the reference's results. Only for a
model that takes images, ``pictures/`` holds its results behind pictures, and ``samples/pictures/`` the prompts; likewise ``sound/``. Reading
checks everything, because a folder may come from anywhere; results are mapped into memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict
from pydantic import ValidationError as SchemaError

from slipway.documents.heldout import HeldOutText
from slipway.errors import ValidationError
from slipway.files.json_documents import LARGEST_LIST
from slipway.files.regular_file import check_regular, read_regular
from slipway.model.families import FAMILIES, RAW_SPEECH, Family
from slipway.proof.arrays import map_array
from slipway.proof.runtime import Samples
from slipway.proof.sights import read_sights
from slipway.stage import Context
from slipway.validation.comparisons import LogitComparison
from slipway.validation.findings import AdapterEvidence
from slipway.validation.parts import MultiTokenHead
from slipway.validation.pictures import Sense
from slipway_validate.cases import shape_cases
from slipway_validate.judging.yardsticks import ReferenceRun
from slipway_validate.params import SampleParams
from slipway_validate.preparation import Prepared
from slipway_validate.protocol.inputs import INPUTS_FILE, SOUNDS_FILE, EncodedInputs
from slipway_validate.protocol.messages import (
    BASE_LOGITS_FILE,
    LOGITS_FILE,
    RunResult,
    case_file,
    long_file,
    plain_file,
)
from slipway_validate.protocol.pictures import Looked
from slipway_validate.protocol.routes import BASE_ROUTES_FILE, ROUTES_FILE, read_routes

FILE = "reference.json"
SAMPLES = "samples"
_LARGEST_BATCH, _LARGEST_SOUNDS = 1 << 24, 1 << 28
_REMEDY = "make it again with the stage reference from the same base, adapter and held-out text"


class Figures(BaseModel):
    """The figures of a :class:`ReferenceRun`, by its names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    perplexity: float | None = None
    base_perplexity: float | None = None
    gain_per_window: tuple[float | None, ...] = ()
    adapter_effect: LogitComparison | None = None
    logit_scale: float = 1.0
    noise: float | None = None
    unsteady_cases: dict[str, str] = {}
    evidence: tuple[AdapterEvidence, ...] = ()
    multi_token_head: MultiTokenHead | None = None


class ReferenceFile(BaseModel):
    """Contents of ``reference.json``.

    Attributes:
        schema_version: Raised when a field changes its meaning.
        none: Why there are no results; empty if there are.
        inputs: Digests of the inputs by name; empty if the stage ran on plain folders.
        params: Parameters of the stage.
        family: Name of the model's family; empty without results.
        with_adapter: Whether it is base + adapter, not a plain model.
        text_source: Origin of the text, in words.
        text_files: Used files, in order.
        held_out: Whether the user gave the text.
        source: Description of inputs that replace text.
        padding_token: Token that pads a batch.
        embeds: Whether the model is a sentence encoder of a known pooling.
        result: Result of the reference's runner.
        figures: Figures of its results.
        warnings: Warnings of the stage.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    none: str = ""
    inputs: dict[str, str]
    params: SampleParams
    family: str = ""
    with_adapter: bool = False
    text_source: str = ""
    text_files: tuple[str, ...] = ()
    held_out: bool = False
    source: str = ""
    padding_token: int = 0
    embeds: bool = False
    result: RunResult = RunResult()
    figures: Figures = Figures()
    warnings: tuple[str, ...] = ()


class NoReferenceError(ValidationError):
    """There is no reference, because the validation does not understand the model or adapter; nothing is known to be wrong."""


def write_nothing(folder: Path, params: SampleParams, ctx: Context, *, why: str) -> None:
    """Write the reference of a model or adapter that the validation does not understand: there are no results."""
    _write(folder, ReferenceFile(inputs=dict(ctx.input_digests), params=_sample_params(params), none=why))


def write_reference(folder: Path, run: ReferenceRun, prepared: Prepared, params: SampleParams, ctx: Context) -> None:
    """Move samples and results into a new folder, and write what is known about them."""
    prepared.folder.rename(folder / SAMPLES)
    for path in sorted(run.folder.glob("*.npy")):
        if not path.match(case_file("*")):  # its own cases are only needed for the figures
            path.rename(folder / path.name)
    for sense in Sense:
        if (run.folder / sense).is_dir():
            (run.folder / sense).rename(folder / sense)
    figures = Figures.model_validate({name: getattr(run, name) for name in Figures.model_fields})
    file = ReferenceFile(
        inputs=dict(ctx.input_digests),
        params=_sample_params(params),
        family=prepared.family.name,
        with_adapter=run.with_adapter,
        text_source=prepared.text.source,
        text_files=prepared.text.files,
        held_out=prepared.text.held_out,
        source=prepared.source,
        padding_token=prepared.padding_token,
        embeds=prepared.embeds,
        result=run.result,
        figures=figures,
        warnings=tuple(ctx.facts.get("warnings", ())),
    )
    _write(folder, file)


def read_reference(
    folder: Path, *, inputs: Mapping[str, Path], merged_level: str, tokenizer: Path, ctx: Context
) -> tuple[ReferenceRun, Prepared, ReferenceFile]:
    """Read and check the folder of a reference.

    Args:
        folder: The folder.
        inputs: The validation's inputs, to which it must belong.
        merged_level: Row of the limits for the merge's data type.
        tokenizer: Folder of the tokenizer.
        ctx: The validation's context, with the digests of its inputs.

    Raises:
        NoReferenceError: It has no results, and says why.
        ValidationError: ``VALIDATION_IMPOSSIBLE``: it is damaged, or it belongs to other inputs.
    """
    try:
        file = ReferenceFile.model_validate_json(read_regular(folder / FILE, largest=LARGEST_LIST))
    except (OSError, ValueError, SchemaError) as error:
        raise _reference_error(f"its files are damaged: {error}") from error
    _check_inputs(file, ctx)
    if file.none:
        raise NoReferenceError(file.none, reason="VALIDATION_IMPOSSIBLE")
    try:
        samples = _read_samples(folder / SAMPLES)
        _check_results(folder, file, samples)
        for sense in Sense:
            _check_sights(folder, file, sense)
    except (OSError, ValueError, EOFError, SchemaError) as error:
        raise _reference_error(f"its files are damaged: {error}") from error
    if file.with_adapter != ("adapter" in inputs):
        raise _reference_error("it was made with an adapter" if file.with_adapter else "it was made without an adapter")
    run = ReferenceRun(
        folder=folder,
        result=file.result,
        family=_find_family(file),
        samples=samples,
        with_adapter=file.with_adapter,
        merged_level=merged_level,
        **{name: getattr(file.figures, name) for name in Figures.model_fields},
    )
    text = HeldOutText((), file.text_source, file.text_files, held_out=file.held_out)
    prepared = Prepared(
        run.family, text, file.source, folder / SAMPLES, samples, file.padding_token, tokenizer, embeds=file.embeds
    )
    for name, continuations, count in (
        ("continuations", run.result.continuations, file.params.prompts),
        (
            "long continuations",
            run.result.long.continuations if run.result.long else (),
            file.params.continuation_prompts,
        ),
    ):
        if continuations and len(continuations) != len(prepared.prompts(count)):
            raise _reference_error(f"its files are damaged: it has {len(continuations)} {name}")
    return run, prepared, file


def _check_inputs(file: ReferenceFile, ctx: Context) -> None:
    for name in ("base", "adapter", "heldout", "test_inputs"):
        ours, theirs = ctx.input_digests.get(name, ""), file.inputs.get(name, "")
        if ctx.input_digests and ours != theirs:
            raise _reference_error(
                f"it was made from the {name} {theirs or 'nothing'}, and this validation has {ours or 'none'}"
            )


def _sample_params(params: SampleParams) -> SampleParams:
    return SampleParams.model_validate({name: getattr(params, name) for name in SampleParams.model_fields})


def _write(folder: Path, file: ReferenceFile) -> None:
    (folder / FILE).write_text(file.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _reference_error(why: str) -> ValidationError:
    return ValidationError(f"the reference cannot be used: {why}", reason="VALIDATION_IMPOSSIBLE", remedy=_REMEDY)


def _find_family(file: ReferenceFile) -> Family:
    family = next((each for each in FAMILIES if each.name == file.family), None)
    if family is None:
        raise ValueError(f"the family {file.family!r} is unknown")
    return family


def _read_samples(folder: Path) -> Samples:
    for path in sorted(each for each in folder.iterdir() if each.name not in tuple(Sense)):
        if path.suffix == ".npy" and map_array(path).size > (
            _LARGEST_SOUNDS if path.name == SOUNDS_FILE else _LARGEST_BATCH
        ):
            raise ValueError(f"{path.name} is too large")
        check_regular(path)
    samples = Samples.read(folder)
    count, length = _shape(samples.tokens, "tokens", kinds="iu")
    for name, limit in (("positions", length), ("labels", 0)):
        values = getattr(samples, name)
        if values is not None and (_shape(values, name, kinds="iu")[0] != count or values.min() < 0):
            raise ValueError(f"{name} have the shape {values.shape} for {count} samples")
        if values is not None and limit and values.max() >= limit:
            raise ValueError(f"{name} are beyond the {limit} tokens of a sample")
    if samples.source is not None and (samples.source.ndim not in (2, 3) or len(samples.source) != count):
        raise ValueError(f"source has the shape {samples.source.shape} for {count} samples")
    if samples.tokens.min() < 0:
        raise ValueError("tokens are negative")
    return samples


def _shape(values: Any, name: str, *, kinds: str) -> tuple[int, int]:
    if values.ndim != 2 or not values.size or values.dtype.kind not in kinds:
        raise ValueError(f"{name} have the shape {values.shape} and the type {values.dtype}")
    return int(values.shape[0]), int(values.shape[1])


def _check_results(folder: Path, file: ReferenceFile, samples: Samples) -> None:
    names = [LOGITS_FILE, *([BASE_LOGITS_FILE] if file.with_adapter else [])]
    shapes = set()
    for name in names:
        values = map_array(folder / name)
        shapes.add(values.shape)
        if (
            values.ndim != 3
            or values.dtype != np.float32
            or values.shape[::2] != (len(samples.tokens), file.result.vocabulary)
        ):
            raise ValueError(f"{name} has the shape {values.shape} and the type {values.dtype}")
    cases = shape_cases(
        _find_family(file), *samples.tokens.shape, embedding=file.embeds, every=file.params.evidence.every_case
    )
    for plain in sorted({case.plain for case in cases if case.plain and case.name not in file.result.skipped_cases}):
        values = map_array(folder / plain_file(plain))
        if values.ndim != 2 or values.dtype != np.float32:
            raise ValueError(f"{plain_file(plain)} has the shape {values.shape} and the type {values.dtype}")
    for routes in (read_routes(folder / name) for name in (ROUTES_FILE, BASE_ROUTES_FILE)):
        if routes is not None and routes.shape[1] != samples.tokens.size:
            raise ValueError(f"experts were chosen for {routes.shape[1]} of {samples.tokens.size} tokens")
    _check_continuations(file)
    _check_long(folder, file)
    _check_answers(folder, file)
    labels = samples.labels
    if len(shapes) > 1 or (labels is not None and labels.shape[1] > next(iter(shapes))[1]):
        raise ValueError(f"results have the shapes {sorted(shapes)}")


def _check_sights(folder: Path, file: ReferenceFile, sense: Sense) -> None:
    """Refuse prompts with pictures or sound that outputs could not compute, and results of others."""
    looked = Looked.read(folder, sense)
    if looked is not None and not looked.pictures and not looked.not_run:
        raise ValueError(f"{sense} has no results, and does not say why")
    if looked is not None and looked.not_run:
        return
    sights = read_sights(folder / SAMPLES, sense)
    count, tokens = (looked.pictures, looked.tokens) if looked else (0, 0)
    if len(sights) != count or any(each.compared != tokens for each in sights):
        raise ValueError(f"{len(sights)} prompts with a {sense.one} have results of {count} with {tokens} tokens each")
    if any(int(each.tokens.max()) >= file.result.vocabulary for each in sights):
        raise ValueError(
            f"a prompt with a {sense.one} has tokens beyond the {file.result.vocabulary} of the vocabulary"
        )
    for name in (LOGITS_FILE, *([BASE_LOGITS_FILE] if file.with_adapter else [])) if count else ():
        values = map_array(folder / sense / name)
        if values.dtype != np.float32 or values.shape != (count, tokens, file.result.vocabulary):
            raise ValueError(f"{sense}/{name} has the shape {values.shape} and the type {values.dtype}")


def _check_continuations(file: ReferenceFile) -> None:
    """Refuse continuations that outputs could not compute."""
    for tokens in file.result.continuations:
        if len(tokens) != file.params.max_new_tokens:
            raise ValueError(f"a continuation has {len(tokens)} tokens, not {file.params.max_new_tokens}")
        if not all(0 <= token < file.result.vocabulary for token in tokens):
            raise ValueError(f"a continuation has tokens beyond the {file.result.vocabulary} of the vocabulary")


def _check_long(folder: Path, file: ReferenceFile) -> None:
    long = file.result.long
    if long is None:
        return
    for index, tokens in enumerate(long.continuations):
        values = map_array(folder / long_file(index))
        if values.dtype != np.float32 or values.shape != (len(tokens), file.result.vocabulary):
            raise ValueError(f"{long_file(index)} has the shape {values.shape} and the type {values.dtype}")
    if len(long.cache_divergences) != len(long.continuations):
        raise ValueError(f"{len(long.continuations)} long continuations have {len(long.cache_divergences)} divergences")


def _check_answers(folder: Path, file: ReferenceFile) -> None:
    answers = file.result.answers.answers if file.result.answers and not file.result.answers.skipped else ()
    if (folder / SAMPLES / INPUTS_FILE).exists():
        encoded = EncodedInputs.model_validate_json(read_regular(folder / SAMPLES / INPUTS_FILE, largest=LARGEST_LIST))
        if answers and len(encoded.inputs) != len(answers):
            raise ValueError(f"{len(encoded.inputs)} test inputs have {len(answers)} answers")
        _check_sounds(folder / SAMPLES / SOUNDS_FILE, file, len(encoded.inputs))
    elif answers:
        raise ValueError("answers have no test inputs")


def _check_sounds(path: Path, file: ReferenceFile, count: int) -> None:
    family = _find_family(file)
    if not family.takes_sound:
        return
    values = map_array(path)
    if values.ndim != (2 if family == RAW_SPEECH else 3) or values.dtype != np.float32 or len(values) != count:
        raise ValueError(
            f"{path.name} has the shape {values.shape} and the type {values.dtype} for {count} test inputs"
        )
