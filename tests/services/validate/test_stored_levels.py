"""Outputs at the levels of compressed-tensors: their stored weights are understood, and they serve what they are judged by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipway.model.safetensors_file import read_weights
from slipway.proof.runtime import Step
from slipway.proof.stored_weights import Coded, Turned
from slipway.proof.transformers_runtime import load
from slipway.registry import load_stage
from slipway.stage import Context
from slipway_validate.judging import survival
from slipway_validate.judging.distances import LIMITS
from slipway_validate.runner.survival import measuring
from slipway_validate.runner.survival.checkpoints import Checkpoint
from support.models import judged_families
from support.models.stored_survival import survival_of
from support.models.validated_here import Validated
from support.models.validation_models import Models

LEVELS = ("w8a8", "fp8", "nvfp4", "mxfp4", "int3")


@pytest.fixture(scope="module")
def folders(tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    stage, made = load_stage("quantize"), {}
    for level in LEVELS:
        for packed in (True, False) if level in LEVELS[2:] else (True,):
            params = stage.params.model_validate(
                {"format": "pytorch", "level": level, "packed": packed, "check": False}
            )
            work = tmp_path_factory.mktemp(level)
            made[level if packed else f"{level}-dense"] = stage.run(
                {"model": tiny.merged}, params, Context(workdir=work)
            )["model"]
    return made


def test_stored_weights_are_those_that_are_computed_with(folders: dict[str, Path]) -> None:
    name, rows = "model.layers.1.mlp.down_proj.weight", slice(None)
    for level in LEVELS[2:]:
        values = Checkpoint(read_weights(folders[level])).weight(name, turned=False).take(rows)
        dense = Checkpoint(read_weights(folders[f"{level}-dense"])).weight(name, turned=False).take(rows)
        assert torch.allclose(values.values, dense.values, rtol=2**-8, atol=0)  # compressed-tensors unpacks to bfloat16
        assert values.changed_from(values.values) == 0
        assert 0.2 < values.changed_from(values.values.roll(1, 1)) / values.values.numel() <= 1


@pytest.mark.parametrize("most", [measuring.MOST_VALUES, 1000])
def test_pieces_of_a_weight_give_the_figures_of_the_whole(
    tiny: Models, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Weights of this size are one piece: smaller pieces stand in for larger weights, and fewer values for sampled rows."""
    outputs = {"pytorch": tiny.merged, **folders}
    monkeypatch.setattr(measuring, "MOST_VALUES", most)  # no weight of a test has a million values
    whole = survival_of(tiny.base, tiny.adapter, outputs)
    monkeypatch.setattr(measuring, "PIECE", 300)  # some rows, which do not divide all rows evenly
    pieces = survival_of(tiny.base, tiny.adapter, outputs)
    for name, found in whole.items():
        assert found.modules
        assert not found.left_out
        for one, other in zip(found.modules, pieces[name].modules, strict=True):
            for field, value in one.model_dump().items():
                found_there = getattr(other, field)
                assert found_there == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), field


def test_later_rows_of_codes_with_one_scale_and_of_turned_codes_are_those_of_the_whole() -> None:
    codes = torch.arange(24, dtype=torch.int32).reshape(6, 4) - 12
    coded = Coded(lambda rows: codes[rows], torch.tensor([[0.5]]), torch.tensor([[1]]), (-128, 127), (6, 4))
    wanted = (codes.float() - 1) / 2
    for rows in (slice(0, 6, 2), slice(2, 6, 2), slice(4, 5)):
        assert torch.equal(coded.take(rows).values, wanted[rows])
    turned = Turned(coded)
    for rows in (slice(0, 4, 3), slice(2, 4)):
        assert torch.equal(turned.take(rows).values, wanted.T[rows])


def test_the_adapter_is_found_at_every_level(tiny: Models, folders: dict[str, Path]) -> None:
    outputs = {level: folders[level] for level in LEVELS}
    found = survival_of(tiny.base, tiny.adapter, outputs)
    for level, each in found.items():
        assert not each.not_run
        assert not each.left_out
        assert all(check.passed for check in survival.checks(each, LIMITS[level])), level
        assert all(0 < module.changed < 1 for module in each.modules)


@pytest.mark.parametrize("level", ["fp8", "w8a8"])
def test_an_output_is_served_in_its_own_type_after_the_comparison(folders: dict[str, Path], level: str) -> None:
    """Unpacked weights have the names of their codes, whose type they must not get again."""
    tokens = np.arange(2, 10)[None]
    step = Step(tokens, np.ones_like(tokens), np.arange(8)[None], None)
    exact = load(folders[level], threads=1).forward(step)[0]
    model = load(folders[level], threads=1)
    model.prepare_comparison()
    compared = model.forward(step)[0]
    model.leave_comparison()
    assert np.array_equal(model.forward(step)[0], exact)
    assert np.allclose(compared, exact, atol=1e-3 * np.abs(exact).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-classes", "bert-masked"])
def test_classifiers_and_encoders_pass_in_8_bits(name: str, tmp_path: Path) -> None:
    """Fewer bits move random weights, of which no result is sure, beyond the limits, as int4 does."""
    model = judged_families.make(name, tmp_path / name)
    merged = model.outputs()["pytorch"]
    (tmp_path / "work").mkdir()
    run = Validated(model.base, model.adapter, tmp_path / "work", merged=merged)
    stage = load_stage("quantize")
    for level in ("w8a8", "fp8"):
        params = stage.params.model_validate({"format": "pytorch", "level": level})
        (tmp_path / level).mkdir()
        folder = stage.run({"model": merged}, params, Context(workdir=tmp_path / level))["model"]
        found = run.output(f"pytorch-{level}", folder)
        assert found.passed, (level, found.explanation)
