"""Sources that a client brings while workers import the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipway.configuration import parse
from slipway.errors import CheckpointValidationError, ConfigurationError
from slipway.exporting.preparing import find_uploads
from slipway.settings import Settings
from slipway.sources import SourceFolders
from slipway.sources.addresses import hub_folder
from support.models import tiny_models


def test_an_adapter_that_names_no_base_does_not_make_one_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.make_base(tmp_path / "base")
    checkpoint = tiny_models.make_checkpoint(tmp_path / "base", tmp_path / "run")
    file = checkpoint / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": None}))
    monkeypatch.chdir(tmp_path / "base")
    configuration = parse({"checkpoint": {"path": str(tmp_path / "run")}, "validation": {"heldout": "s3://texts/a"}})
    with (
        SourceFolders(Settings.from_environment({"SLIPWAY_HOME": str(tmp_path / "home")})) as folders,
        pytest.raises(ConfigurationError, match="names no base model") as caught,
    ):
        find_uploads(configuration, folders, {"heldout": "s3://texts/a"})
    assert "--base-model" in caught.value.remedy


def test_labels_have_no_characters_that_a_coordinator_refuses(tmp_path: Path) -> None:
    tiny_models.make_base(tmp_path / "base")
    tiny_models.make_checkpoint(tmp_path / "base", tmp_path / "run\n\u202e7")
    configuration = parse(
        {
            "checkpoint": {"path": str(tmp_path / "plain")},
            "base_model": {"name": str(tmp_path / "base")},
            "validation": {"heldout": "s3://texts/a"},
        }
    )
    # Paths in settings have no such characters, but the folder behind a link may have them.
    (tmp_path / "plain").symlink_to(tmp_path / "run\n\u202e7")
    with SourceFolders(Settings.from_environment({"SLIPWAY_HOME": str(tmp_path / "home")})) as folders:
        found = find_uploads(configuration, folders, {"heldout": "s3://texts/a"})
    assert found.labels["model_name"] == "run \ufffd7"


@pytest.mark.parametrize("url", ["hf://owner/name@../x", "hf://owner/name@", "hf://../name", "hf://"])
def test_what_is_no_repository_is_not_looked_for(url: str) -> None:
    with pytest.raises(CheckpointValidationError, match="this is not a repository name") as caught:
        hub_folder(url)
    assert caught.value.reason == "BASE_MODEL_NOT_FOUND"
