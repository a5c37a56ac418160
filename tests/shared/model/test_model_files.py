"""Which files are a base model's, and where one is found by its name."""

from __future__ import annotations

import json

import pytest

from slipway.errors import CheckpointValidationError
from slipway.model.model_files import model_files, resolve_base_model
from support.models.tiny_models import base_model


def test_model_files(tmp_path):
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "training_args.bin")
    folder = base_model(tmp_path / "base", *names, "pytorch_model.bin", "README.md")
    found = [path.name for path in model_files(folder)]
    assert found == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


def test_model_files_of_a_sharded_model_are_those_the_index_names(tmp_path):
    folder = base_model(
        tmp_path / "base", "config.json", "model-00001-of-00001.safetensors", "consolidated.safetensors"
    )
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "consolidated.safetensors" not in [path.name for path in model_files(folder)]
    (folder / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointValidationError) as caught:
        resolve_base_model(str(folder))
    assert caught.value.reason == "BASE_MODEL_INVALID"


def test_pickles_of_a_model_travel_where_there_are_no_safetensors(tmp_path):
    folder = base_model(tmp_path / "base", "config.json", "pytorch_model.bin", "training_args.bin")
    assert [path.name for path in model_files(folder)] == ["config.json", "pytorch_model.bin"]
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    sharded = ["config.json", "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]
    assert [path.name for path in model_files(folder)] == sharded


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("config.json", "pytorch_model.bin.index.json"), "BASE_MODEL_INVALID"),
        (("config.json",), "BASE_MODEL_INVALID"),
        (("model.safetensors",), "BASE_MODEL_INVALID"),
    ],
)
def test_unusable_base_folders(tmp_path, names, reason):
    with pytest.raises(CheckpointValidationError) as caught:
        resolve_base_model(str(base_model(tmp_path / "base", *names)))
    assert caught.value.reason == reason
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["someone/never-downloaded", "no such folder/at all/here", "/nowhere/at/all"])
def test_base_model_not_found(tmp_path, monkeypatch, name):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointValidationError) as caught:
        resolve_base_model(name)
    assert caught.value.reason == "BASE_MODEL_NOT_FOUND"
    assert name in str(caught.value)


def test_base_model_from_the_cache(tmp_path, monkeypatch):
    """The layout that huggingface_hub keeps: refs name a commit, snapshots hold its files."""
    pytest.importorskip("huggingface_hub")
    repository = tmp_path / "models--some--base"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    (repository / "snapshots").mkdir()
    snapshot = base_model(repository / "snapshots" / commit, "config.json", "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert resolve_base_model("some/base") == snapshot
