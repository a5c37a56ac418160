"""What the grid that a weight is stored on explains of its difference from base + update, and what it does not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipway.model.safetensors_file import read_weights
from slipway.proof.stored_weights import Coded, StoredWeight
from slipway.validation.survival import AdapterSurvival, ModuleSurvival
from slipway.validation.verdicts import LimitOverrides
from slipway_validate.judging import survival
from slipway_validate.judging.distances import LIMITS, limits_by_level
from slipway_validate.runner.survival.checkpoints import Checkpoint
from slipway_validate.stored_weights import survival_spec
from support.models.stored_survival import said, survival_of
from support.models.validation_models import Models

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Weak:
    """Folders of a model whose adapter was made weaker; the weights of base and merged model are still to be written."""

    base: Path
    adapter: Path
    merged: Path
    weights: Tensors
    updates: Tensors

    def write(self, base: Tensors, merged: Tensors) -> None:
        save_file(base, self.base / "model.safetensors", {"format": "pt"})
        save_file({**base, **merged}, self.merged / "model.safetensors", {"format": "pt"})

    def measured(self) -> AdapterSurvival:
        return survival_of(self.base, self.adapter, {"merged": self.merged})["merged"]


def weakened(tiny: Models, folder: Path, share: float) -> Weak:
    base, adapter, merged = (Path(shutil.copytree(p, folder / p.name)) for p in (tiny.base, tiny.adapter, tiny.merged))
    factors = load_file(adapter / "adapter_model.safetensors")
    weak = {name: value * (share if "lora_B" in name else 1) for name, value in factors.items()}
    save_file(weak, adapter / "adapter_model.safetensors", {"format": "pt"})
    weights, updates = load_file(base / "model.safetensors"), {}
    for name in weights:
        path = f"base_model.model.{name.removesuffix('.weight')}"
        down, up = weak.get(f"{path}.lora_A.weight"), weak.get(f"{path}.lora_B.weight")
        if down is not None and up is not None:
            updates[name] = 1.5 * up @ down
    return Weak(base, adapter, merged, weights, updates)


def test_an_update_below_the_steps_of_bfloat16_is_not_held_against_the_output(tiny: Models, tmp_path: Path) -> None:
    """The base's type loses it: the note says so, and a merge in that type does not fail for it."""
    weak = weakened(tiny, tmp_path, 2e-3)
    before = {name: value.bfloat16() for name, value in weak.weights.items()}
    weak.write(before, {name: (before[name].float() + update).bfloat16() for name, update in weak.updates.items()})
    found = weak.measured()
    assert min(each.expected for each in found.modules) < 0.8
    assert said(found, "bfloat16") == ""
    assert any(
        "smaller than the steps of the base's 16-bit type" in note for note in survival.notes(found, LIMITS["bfloat16"])
    )


@contextmanager
def read_as(codes: Tensors, scales: Tensors) -> Iterator[None]:
    """Have weights of the file read as integers of 4 bits with scales."""

    class Grid(Checkpoint):
        def weight(self, name: str, *, turned: bool) -> StoredWeight:
            if name not in codes:
                return super().weight(name, turned=turned)
            found = codes[name]
            return Coded(lambda rows: found[rows].int(), scales[name], None, (-8, 7), tuple(found.shape))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "slipway_validate.runner.survival.measuring.open_stored", lambda folder, *_: Grid(read_weights(folder))
        )
        yield


@pytest.mark.parametrize(
    ("steps", "factor", "plainly"),
    [(1, 2e-2, "holds the adapter"), (2, 0.2, "of its update instead of")],
    ids=["same", "ties"],
)
def test_what_rounding_does_to_a_base_on_a_grid_is_not_held_against_the_output(
    tiny: Models, tmp_path: Path, steps: int, factor: float, plainly: str
) -> None:
    """A base that was made from a 4-bit file lies on a grid. Rounding to the same grid takes small updates back; where a value of the base
    lies amid two of the output's grid, the update decides between them, and moves it further than it says."""
    weak = weakened(tiny, tmp_path, factor)
    step = {name: weak.weights[name].abs().amax(1, keepdim=True) / 7 for name in weak.updates}
    before = {name: torch.round(weak.weights[name] / step[name]) * step[name] for name in weak.updates}
    scales = {name: steps * each for name, each in step.items()}
    codes = {
        name: torch.round((before[name] + weak.updates[name]) / scale).clamp(-8, 7) for name, scale in scales.items()
    }
    weak.write({**weak.weights, **before}, {name: codes[name] * scale for name, scale in scales.items()})

    plain = weak.measured()
    with read_as(codes, scales):
        coded = weak.measured()
        codes.update({name: torch.round(before[name] / scale).clamp(-8, 7) for name, scale in scales.items()})
        lost = weak.measured()
    strengths = [each.strength or 0.0 for each in coded.modules]
    assert min(strengths) < 0.5 if steps == 1 else max(strengths) > 1.5
    assert plainly in said(plain, "int4"), "without codes, nothing tells it from a fault"
    assert said(coded, "int4") == ""
    assert any("the base's weights lie on a grid" in note for note in survival.notes(coded, LIMITS["int4"]))
    assert all(each.nearest_strength is None or each.off_by < 1e-5 for each in coded.modules)
    assert steps == 1 or "holds the adapter" in said(lost, "int4"), "a lost update is one on any grid that can hold it"


def test_what_the_stored_float_type_takes_back_is_not_held_against_the_output(tiny: Models, tmp_path: Path) -> None:
    """A base in float32 that was saved from bfloat16 lies on that type's grid, in which its merge is stored again."""
    weak = weakened(tiny, tmp_path, 2e-3)
    before = {name: value.bfloat16().float() for name, value in weak.weights.items()}
    weak.write(before, {name: (before[name] + update).bfloat16() for name, update in weak.updates.items()})
    found = weak.measured()
    assert all(each.expected == 1.0 for each in found.modules)
    assert min(each.strength or 0.0 for each in found.modules) < 0.8
    assert said(found, "bfloat16") == ""


@dataclass
class Coarse:
    """A right model in steps that are too wide for most of its values, as outliers make them in the first layers of real models."""

    weak: Weak
    scales: Tensors
    codes: Tensors

    def measured(self) -> AdapterSurvival:
        with read_as(self.codes, self.scales):
            return self.weak.measured()


@pytest.fixture
def coarse(tiny: Models, tmp_path: Path) -> Coarse:
    weak = weakened(tiny, tmp_path, 1.0)
    wanted = {name: weak.weights[name] + update for name, update in weak.updates.items()}
    scales = {name: each.abs().amax(1, keepdim=True) / 7 for name, each in wanted.items()}
    codes = {name: torch.round(each / scales[name]).clamp(-8, 7) for name, each in wanted.items()}
    weak.write(weak.weights, {name: codes[name] * scales[name] for name in codes})
    return Coarse(weak, scales, codes)


FIRST, SECOND = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"


def test_a_weight_that_its_grid_holds_no_better_is_coarse_and_not_another(coarse: Coarse) -> None:
    plain, found = coarse.weak.measured(), coarse.measured()
    assert "hold other weights" in said(plain, "int8"), "without codes, nothing tells it from another weight"
    assert said(found, "int8") == ""
    assert any("the output's grid is coarse" in note for note in survival.notes(found, LIMITS["int8"]))
    assert not any("lie on a grid" in note for note in survival.notes(found, LIMITS["int8"]))


def test_another_weight_on_a_coarse_grid_is_named(coarse: Coarse) -> None:
    coarse.codes[FIRST], coarse.codes[SECOND] = coarse.codes[SECOND], coarse.codes[FIRST]
    assert "holds the weight of" in said(coarse.measured(), "int8")


@pytest.mark.parametrize("factor", [0.0, 0.25], ids=["empty", "too short"])
def test_a_grid_that_ends_too_early_explains_nothing(coarse: Coarse, factor: float) -> None:
    weak, scale = coarse.weak, coarse.scales[FIRST] * factor
    coarse.scales[FIRST] = scale
    wanted = weak.weights[FIRST] + weak.updates[FIRST]
    coarse.codes[FIRST] = torch.round(wanted / scale).clamp(-8, 7) if factor else torch.zeros_like(wanted)
    assert FIRST.removesuffix(".weight") in said(coarse.measured(), "int8")


def test_the_grid_is_asked_above_the_limits_in_force(coarse: Coarse) -> None:
    weak = coarse.weak
    inputs = {"base": weak.base, "adapter": weak.adapter, "onnx": weak.merged}
    limits = limits_by_level({"float32": LimitOverrides(module_weight_error=0.03)})
    usual, own = survival_spec(inputs, LIMITS), survival_spec(inputs, limits)
    assert usual is not None
    assert own is not None
    assert (usual.largest_errors, own.largest_errors) == ({"onnx": 1e-5}, {"onnx": 0.03})


def test_an_error_counts_where_it_is_more_than_a_calibrated_rounding_makes() -> None:
    assert ModuleSurvival(module="m", weight_error=0.14, nearest_error=0.1).unexplained_error == 0.0
    assert ModuleSurvival(module="m", weight_error=0.25, nearest_error=0.1).unexplained_error == pytest.approx(0.2)
    assert ModuleSurvival(module="m", weight_error=0.25).unexplained_error == 0.25
    assert ModuleSurvival(module="m", nearest_error=0.1).unexplained_error is None
