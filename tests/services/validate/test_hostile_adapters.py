"""The reference puts the adapter on the base by itself, so it checks what peft would follow, whatever the merge has checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slipway.proof.runtime import Unusable
from slipway_validate.runner.runtime_reference import load
from support.models import tiny_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("target_modules", r"(.*)*x"),
        ("exclude_modules", r"(.*)*x"),
        ("rank_pattern", {r"(.*)*x": 4}),
        ("layer_replication", [[0, 1_000_000_000]]),
        ("r", 10**9),
        ("target_parameters", [1]),
        ("target_parameters", "experts.down_proj"),
    ],
)
def test_work_without_end_and_values_of_another_type_are_refused(
    models: Path, tmp_path: Path, option: str, value: Any
) -> None:
    adapter = shutil.copytree(models / "run" / "checkpoint-10", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, option: value}))
    with pytest.raises(Unusable, match=option):
        load(models / "base", adapter, threads=1)


def test_a_pickle_is_not_loaded(models: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(models / "run" / "checkpoint-10", tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(Unusable, match=r"adapter_model\.safetensors"):
        load(models / "base", adapter, threads=1)
