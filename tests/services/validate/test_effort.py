"""What each effort leaves out or adds; all of them find an adapter that is lost, too weak, or in the wrong layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, ENCODER_DECODER, SEQUENCE_CLASSIFIER
from slipway.validation.findings import OutputStatus
from slipway.validation.inputs import Effort
from slipway_validate.cases import shape_cases
from slipway_validate.params import EVIDENCE, SampleParams, ValidateParams
from slipway_validate.preparation import benchmark_of
from support.models.validated_here import Validated
from support.models.validation_models import Models, all_ones, edited_onnx, negated

EFFORTS = [pytest.param(name, marks=() if name == "quick" else pytest.mark.slow) for name in get_args(Effort)]


def test_every_effort_has_its_evidence() -> None:
    assert set(EVIDENCE) == set(get_args(Effort))
    assert SampleParams().effort == ValidateParams().effort == "standard"


@pytest.mark.parametrize(
    ("effort", "windows", "bytes_factor", "prompts"),
    [("quick", 4, 1, 0), ("standard", 10, 1, 4), ("thorough", 40, 4, 4)],
)
def test_what_is_computed(effort: Effort, windows: int, bytes_factor: int, prompts: int) -> None:
    params = SampleParams(effort=effort)
    assert (params.windows, params.prompts) == (windows, prompts)
    assert params.logit_bytes == bytes_factor * params.max_logit_bytes
    assert SampleParams(effort="quick", test_samples=2).windows == 2


def test_only_thorough_takes_more_than_five_rounds() -> None:
    """A speed is called stable from three on; where three do not agree, seven mostly do not."""
    assert {name: (each.rounds, each.most_rounds) for name, each in EVIDENCE.items()} == {
        "quick": (3, 1 << 30),
        "standard": (3, 5),
        "thorough": (0, 1 << 30),
    }


@pytest.mark.parametrize(
    ("effort", "asked", "steps"),
    [("quick", 16, (1, 8)), ("standard", 16, (1, 8)), ("standard", 3, (1, 3)), ("thorough", 16, (2, 16))],
)
def test_a_round_is_bounded_in_steps(effort: Effort, asked: int, steps: tuple[int, int]) -> None:
    found = benchmark_of(ValidateParams(effort=effort, benchmark_decode_steps=asked), ModelConfig({}), DECODER)
    assert found is not None
    assert (found.prefills, found.decode_steps) == steps


@pytest.mark.parametrize(("longest", "prompt"), [(4096, 128), (138, 128), (128, 118), (12, 6), (1, 1)])
def test_a_prompt_leaves_room_for_the_steps_after_it(longest: int, prompt: int) -> None:
    params, config = ValidateParams(sequence_length=128), ModelConfig({"max_position_embeddings": longest})
    found = benchmark_of(params, config, DECODER)
    assert found is not None
    assert (found.prefill_tokens, found.longest_text) == (prompt, longest)
    classes = benchmark_of(params, config, SEQUENCE_CLASSIFIER)
    assert classes is not None
    assert classes.prefill_tokens == min(128, classes.longest_text)


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        (DECODER, {"decode_left_padded"}),
        (ENCODER_DECODER, {"decode_right_padded"}),
        (SEQUENCE_CLASSIFIER, {"right_padded"}),
    ],
)
def test_the_case_that_quick_keeps_has_padding_and_a_cache(family: Any, kept: set[str]) -> None:
    assert {case.name for case in shape_cases(family, 4, 48, every=False)} == kept
    assert len(shape_cases(family, 4, 48)) > len(kept)


def swap_layers(module: Any) -> None:
    """Merge what the adapter adds to the two layers each into the other."""
    first, second = (layer.mlp.down_proj.weight for layer in module.model.layers)
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


@pytest.mark.parametrize("effort", EFFORTS)
def test_faults_of_the_adapter_are_found(effort: Effort, tiny: Models, tmp_path: Path) -> None:
    run = Validated(tiny.base, tiny.adapter, tmp_path, merged=tiny.merged, params={"effort": effort})
    assert run.output("pytorch", tiny.merged).status is OutputStatus.PASSED
    wrong = {
        "lost": tiny.without_adapter(f"lost-{effort}"),
        "weak": tiny.scaled(f"weak-{effort}", 0.92),
        "swapped": tiny.variant(f"swapped-{effort}", swap_layers),
    }
    for name, folder in wrong.items():
        found = run.output(f"pytorch-{name}", folder)
        assert found.status is OutputStatus.FAILED, name
        assert {"mean_kl", "max_abs_diff"} <= {check.name for check in found.failed_checks}, name
    assert "behaves like the base model" in run.output("pytorch-again", wrong["lost"]).explanation


@pytest.mark.slow
def test_quick_finds_an_ignored_mask_and_a_wrong_cache(tiny: Models, tiny_onnx: Path, tmp_path: Path) -> None:
    run = Validated(tiny.base, tiny.adapter, tmp_path, merged=tiny.merged, params={"effort": "quick"})
    assert run.output("onnx", tiny_onnx).status is OutputStatus.PASSED
    nomask = edited_onnx(tiny_onnx, tmp_path / "nomask", replaced="attention_mask", by=all_ones)
    cache = edited_onnx(tiny_onnx, tmp_path / "cache", replaced="past_key_values.1.key", by=negated)
    for name, folder in (("nomask", nomask), ("cache", cache)):
        failed = {check.name for check in run.output(f"onnx-{name}", folder).failed_checks}
        assert failed == {
            "decode_left_padded.mean_kl",
            "decode_left_padded.max_abs_diff",
        }, name
