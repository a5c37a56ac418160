"""Which base an adapter names, and where it is found: beside the run, or in the Hugging Face cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.base_match import BaseMatch, BaseMatchStatus
from slipway.base_match.evidence import UsedBase, match_base
from slipway.configuration import ExportConfiguration
from slipway.errors import CheckpointValidationError, ModelExportError
from slipway.export_sources.discovery import find_sources
from slipway.settings import Settings
from slipway.sources import SourceFolders
from support.models.matched_models import (
    cache_snapshot,
    judge,
    make_adapter,
    make_model,
    weights,
)


@pytest.mark.parametrize(
    "name",
    [
        "",
        None,
        7,
        "~nobody-of-this-name/base",
        "a" * 5000,
        "a\0b",
        "../" * 2000,
        "\udc80",
        "https://[::1",
        "C:\\models\\base",
    ],
)
def test_hostile_names_are_names(tmp_path: Path, name: object) -> None:
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", base=name)
    found = judge(make_model(tmp_path / "used"), adapter)
    assert found.status is BaseMatchStatus.UNPROVEN
    labels = found.labels()
    assert all(len(value.encode()) <= 2048 and "\0" not in value for value in labels.values())
    assert BaseMatch.of_labels(labels).status is found.status


@pytest.mark.parametrize(
    "name", ["~nobody-of-this-name/base", "a" * 5000, "a\0b", "../" * 2000, "\udc80", "https://[::1"]
)
def test_a_hostile_name_is_a_base_that_is_not_found(tmp_path: Path, name: str) -> None:
    make_adapter(tmp_path / "run" / "checkpoint-1", base=name)
    configuration = ExportConfiguration.model_validate({"checkpoint": {"path": str(tmp_path / "run")}})
    settings = Settings.from_environment({"SLIPWAY_HOME": str(tmp_path / "home")})
    with SourceFolders(settings) as folders, pytest.raises(ModelExportError) as error:
        find_sources(configuration, folders)
    assert error.value.reason == "BASE_MODEL_NOT_FOUND"


def test_the_base_that_the_adapter_names_is_found_beside_the_run_first(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "work" / "base", weights(seed=5))  # of the same name, where the command is given
    monkeypatch.chdir(tmp_path / "work")
    configuration = ExportConfiguration.model_validate({"checkpoint": {"path": str(adapter.parent)}})
    settings = Settings.from_environment({"SLIPWAY_HOME": str(tmp_path / "home")})
    with SourceFolders(settings) as folders:
        assert find_sources(configuration, folders).base == tmp_path / "base"


def test_the_cached_repository_that_the_adapter_names_confirms_the_base(tmp_path: Path) -> None:
    snapshot = cache_snapshot(tmp_path, weights())
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", base="owner/base")
    found = judge(snapshot, adapter)
    assert found.status is BaseMatchStatus.CONFIRMED
    assert "owner/base" in found.reason
    assert judge(make_model(tmp_path / "copy"), adapter).status is BaseMatchStatus.CONFIRMED
    # A folder of the repository's name beside the run is not the repository.
    with pytest.raises(CheckpointValidationError, match="other values"):
        judge(make_model(tmp_path / "owner" / "base", weights(seed=5)), adapter)


def test_two_revisions_of_a_repository_are_no_mismatch_unless_the_adapter_names_one(tmp_path: Path) -> None:
    older = cache_snapshot(tmp_path, weights(seed=5), commit="b" * 40)
    cache_snapshot(tmp_path, weights())
    adapter = make_adapter(tmp_path / "run" / "checkpoint-1", base="owner/base")
    assert judge(older, adapter).status is BaseMatchStatus.UNPROVEN
    named = make_adapter(tmp_path / "run" / "checkpoint-2", base="owner/base", revision="a" * 40)
    with pytest.raises(CheckpointValidationError, match="other values"):
        judge(older, named)


def test_of_several_adapters_the_least_certain_counts(adapter: Path, tmp_path: Path) -> None:
    used = make_model(tmp_path / "used")
    unnamed = make_adapter(tmp_path / "second", base=None)
    found = match_base(UsedBase(used, "used", contents=True), [adapter, unnamed], trust=False)
    assert found.status is BaseMatchStatus.UNPROVEN
