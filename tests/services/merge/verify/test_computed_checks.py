"""Every weight that was computed whole is read anew after the write and compared with base and adapter, unmerged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import ModelMergeError
from slipway.stage import Context
from slipway_merge import merge as merge_module
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from slipway_merge.verify.spot_check import spot_check
from support.models.merge_forms import FORMS, save_form

#: Of every way a weight is computed and looked at: linear, transposed, convolution, embedding, bias, other layers, shared state.
CHECKED = ["dora", "dora on Conv1D", "dora on Conv2d", "loha", "lokr on Conv2d", "oft", "hira", "ia3 with biases", "lora_bias",
           "ln_tuning", "vera", "road", "lora on Conv1d", "pissa", "target_parameters", "target_parameters, rslora",
           "trainable_token_indices"]  # fmt: skip
Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def merged_but(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, dtype: torch.dtype, change: Change) -> Any:
    """Merge a form; ``change`` makes something else of the last weight that was computed, from it and the base's."""
    case, _ = save_form(folder, FORMS[name], dtype)
    base, found = load_file(case.base / "model.safetensors"), {}

    def spot_check_after(folder, layout, reader, **options):
        planned = [tensor for shard in layout.shards for tensor in shard.tensors]
        found["tensor"] = [tensor.name for tensor in planned if tensor.value.computed is not None][-1]
        tensors = load_file(folder / "model.safetensors")
        weight = tensors[found["tensor"]]
        tensors[found["tensor"]] = change(weight, base[found["tensor"]]).to(weight.dtype)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return spot_check(folder, layout, reader, **options)

    monkeypatch.setattr(merge_module, "spot_check", spot_check_after)
    ctx = Context(workdir=case.workdir)
    try:
        STAGE.run({"base": case.base, "adapter": case.adapter}, MergeParams(verify="spot"), ctx)
    except ModelMergeError as error:
        assert error.reason == "MERGE_NOT_VERIFIED"
        assert error.about["tensor"] == found["tensor"]
        return None
    return ctx.facts


def first_row_lost(weight: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return torch.cat([base[:1], weight[1:]])


CHANGES: dict[str, Change] = {
    "base's": lambda _, base: base,
    "rolled": lambda weight, _: weight.roll(1, 0),
    "scaled": lambda weight, _: weight * 1.05,
}


@pytest.mark.parametrize("damage", CHANGES)
@pytest.mark.parametrize("name", CHECKED)
def test_a_wrong_weight_is_named(monkeypatch, tmp_path, name, damage):
    assert merged_but(monkeypatch, tmp_path, name, torch.bfloat16, CHANGES[damage]) is None


@pytest.mark.parametrize("name", ["dora", "dora on Conv2d", "loha", "vera", "ln_tuning"])
def test_one_row_without_its_change_is_found(monkeypatch, tmp_path, name):
    assert merged_but(monkeypatch, tmp_path, name, torch.float32, first_row_lost) is None


@pytest.mark.parametrize("name", CHECKED)
def test_what_is_right_passes_with_room(monkeypatch, tmp_path, name):
    facts = merged_but(monkeypatch, tmp_path, name, torch.bfloat16, lambda weight, _: weight)
    assert facts["verified"]["modules_computed"] == facts["tensors_merged"]
    assert 0 <= facts["verified"]["largest_error_of_tolerance"] < 1
