"""A base whose config.json does not say what kind of model it is: refused before anything runs, or taken with the setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipway.configuration import parse
from slipway.errors import CheckpointValidationError
from slipway.export_sources.discovery import find_sources
from slipway.planning.plan import plan
from slipway.settings import Settings
from slipway.sources import SourceFolders
from support.models import tiny_models


def unnamed(folder: Path) -> Path:
    base = tiny_models.make_base(folder)
    config = json.loads((base / "config.json").read_text())
    del config["model_type"]
    (base / "config.json").write_text(json.dumps(config))
    return base


def test_the_remedy_is_a_setting_that_works(tmp_path: Path) -> None:
    base = unnamed(tmp_path / "base")
    asked: dict[str, Any] = {"base_model": {"name": str(base)}, "checkpoint": {"path": "none"}}
    with SourceFolders(Settings.from_environment({"SLIPWAY_HOME": str(tmp_path / "home")})) as folders:
        with pytest.raises(CheckpointValidationError, match="names no model_type") as caught:
            find_sources(parse(asked), folders)
        assert str(base) in caught.value.message
        assert "base_model.model_type: bert" in caught.value.remedy
        asked["base_model"]["model_type"] = "qwen3"
        found = find_sources(parse(asked), folders)
    assert found.config is not None
    assert found.config["model_type"] == "qwen3"
    tasks = plan(parse(asked), ["base"])
    (prepared,) = (task for task in tasks if task.stage == "prepare")
    assert prepared.params["model_type"] == "qwen3"
    validated = next(task for task in tasks if task.stage == "validate")
    assert validated.inputs["base"] == prepared.reference


def test_the_kind_is_given_to_the_preparation_of_an_adapters_base() -> None:
    named = parse({"base_model": {"name": "base", "model_type": "bert"}, "checkpoint": {"path": "run"}})
    tasks = {task.stage: task for task in plan(named, ("adapter", "base"))}
    assert tasks["prepare"].params["model_type"] == "bert"
    assert tasks["merge"].inputs["base"] == tasks["prepare"].reference
    without = parse({"base_model": {"name": "base"}, "checkpoint": {"path": "run"}})
    assert "prepare" not in {task.stage for task in plan(without, ("adapter", "base"))}
