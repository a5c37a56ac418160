"""Long continuations: equal ones agree, and a cache that fails late is found where short checks see nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipway.model.folder import ModelFolder
from slipway.proof.runtime import Bounds, LanguageModel, Past, Step
from slipway.proof.transformers_runtime import load
from slipway.stage import Context
from slipway.validation.answers import LongContinuation
from slipway.validation.findings import ValidationReport
from slipway_validate.judging.compare import compare_long
from slipway_validate.params import SampleParams, ValidateParams
from slipway_validate.preparation import long_spec, prepare
from slipway_validate.protocol.messages import LongResult, LongSpec
from slipway_validate.runner.generation.generating import continue_long, generate
from slipway_validate.stage import STAGE
from support.models.validation_models import Models

TOKENS, LATE = 96, 60
PROMPT = (5, 9, 17, 33)


class FailsLate:
    """A model whose positions stop at LATE when it decodes through its cache, as those of a table that is too short."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, step: Step) -> tuple[np.ndarray, Past]:
        if step.past is not None:
            step = replace(step, position_ids=np.minimum(step.position_ids, LATE))
        return self._model.forward(step)


def nothing(logits: np.ndarray, where: str) -> None:
    assert np.isfinite(logits).all(), where


def run(model: object, folder: Path, *, given: tuple[tuple[int, ...], ...] = ()) -> LongResult:
    folder.mkdir()
    spec = LongSpec(prompts=(PROMPT,), new_tokens=TOKENS, given=given)
    return continue_long(model, spec, [None], folder, on_logits=nothing)  # type: ignore[arg-type]


def compared(first: object, second: object, folder: Path) -> LongContinuation:
    theirs = run(first, folder / "reference")
    ours = run(second, folder / "output", given=theirs.continuations)
    found = compare_long(theirs, ours, folders=(folder / "reference", folder / "output"), decode=str)
    assert found is not None
    return found


def test_a_model_agrees_with_itself_to_the_last_token(tiny: Models, tmp_path: Path) -> None:
    model = load(tiny.merged, threads=1)
    found = compared(model, model, tmp_path)
    assert (found.new_tokens, found.same_tokens, found.top1_agreement) == (TOKENS, TOKENS, 1.0)
    assert found.mean_kl == pytest.approx(0, abs=1e-12)
    assert found.cache_kl is not None
    assert found.cache_kl < 1e-6
    assert found.repetition == found.reference_repetition
    assert found.example_output == found.example_reference


def test_positions_that_fail_late_are_found_by_the_cache_alone(tiny: Models, tmp_path: Path) -> None:
    model = load(tiny.merged, threads=1)
    late = FailsLate(model)
    short = generate(late, PROMPT, 16)  # type: ignore[arg-type]
    assert short == generate(model, PROMPT, 16)  # what usual continuations see
    found = compared(model, late, tmp_path)
    assert found.mean_kl == pytest.approx(0, abs=1e-6)  # one pass is right
    assert found.cache_kl is not None
    assert found.cache_kl > 1e-4


def test_another_model_departs_from_the_reference(tiny: Models, tmp_path: Path) -> None:
    found = compared(load(tiny.merged, threads=1), load(tiny.base, threads=1), tmp_path)
    assert found.mean_kl is not None
    assert found.mean_kl > 0.1
    assert len(found.kl_by_position) == 32
    assert found.cache_kl is not None
    assert found.cache_kl < 1e-6  # it is wrong, but not in itself


@pytest.mark.parametrize(
    ("name", "value"), [("has_cache", False), ("bounds", Bounds(past=50))], ids=["cache", "bounds"]
)
def test_what_cannot_decode_so_far_is_skipped_by_name(tiny: Models, tmp_path: Path, name: str, value: object) -> None:
    model = load(tiny.merged, threads=1)
    setattr(model, name, value)
    result = run(model, tmp_path / "run")
    assert result.continuations == ()
    assert ("no KV cache" if name == "has_cache" else "at most 50 cached tokens") in result.skipped
    found = compare_long(LongResult(), result, folders=(tmp_path, tmp_path), decode=str)
    assert found == LongContinuation(skipped=result.skipped)


def test_a_stop_ends_a_text(tiny: Models) -> None:
    model = load(tiny.merged, threads=1)
    text = generate(model, PROMPT, 20)
    assert generate(model, PROMPT, 20, stops={text[5]}) == text[: text.index(text[5])]


def test_a_banned_token_that_does_not_exist_changes_nothing(tiny: Models) -> None:
    model = load(tiny.merged, threads=1)
    assert generate(model, PROMPT, 4, banned=(1 << 20,)) == generate(model, PROMPT, 4)


@pytest.mark.slow
def test_they_stay_within_the_disk_space_for_logits(tiny: Models, held_out: Path, tmp_path: Path) -> None:
    params = SampleParams(
        sequence_length=16, test_samples=16, continuation_tokens=100, continuation_prompts=16, max_logit_bytes=1 << 20
    )
    model = ModelFolder.open(tiny.base)
    assert model.family is not None
    prepared = prepare(
        {"base": tiny.base, "heldout": held_out}, model, model.family, params, Context(workdir=tmp_path), work=tmp_path
    )
    vocabulary = model.config["vocab_size"]
    most = long_spec(prepared, model.config, params)
    assert most is not None
    assert most.new_tokens == (1 << 20) // (2 * 4 * vocabulary * 16) == 51
    assert long_spec(prepared, model.config, params.model_copy(update={"max_logit_bytes": 64 << 20})).new_tokens == 100  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_stage_judges_them(tiny: Models, tiny_onnx: Path, held_out: Path, context: Context) -> None:
    params = ValidateParams(
        sequence_length=48, test_samples=2, continuation_tokens=4096, benchmark_performance=False, max_new_tokens=4
    )
    inputs = {
        "base": tiny.base,
        "adapter": tiny.adapter,
        "heldout": held_out,
        "pytorch": tiny.merged,
        "onnx": tiny_onnx,
    }
    report = ValidationReport.read(STAGE.run({**inputs, "pytorch-base": tiny.base}, params, context)["validation"])
    onnx = report.output("onnx")
    assert onnx.passed
    assert onnx.continuation is not None
    assert onnx.continuation.new_tokens == 128 - 16  # as far as the model goes
    assert {"continuation.mean_kl", "continuation.cache_kl"} <= {check.name for check in onnx.checks}
    assert "continuation.mean_kl" in {check.name for check in report.output("pytorch-base").failed_checks}
