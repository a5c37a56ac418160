"""A base whose tokenizer is tekken.json alone gets one that every later stage reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipway.model.base_format import base_format, is_base_format
from slipway.model.folder import ModelFolder
from slipway.model.model_files import tokenizer_files
from support.models.prepare_models import refusal, run
from support.models.tekken import write_tekken


def tekken_base(dense: Path, folder: Path) -> Path:
    """Copy a model with tekken.json as its only tokenizer."""
    shutil.copytree(dense, folder)
    for path in tokenizer_files(folder):
        path.unlink()
    return write_tekken(folder)


def test_such_a_base_is_prepared_with_the_same_weights(dense, tmp_path):
    base = tekken_base(dense, tmp_path / "base")
    assert base_format(ModelFolder.open(base)) == "tekken"
    assert is_base_format("tekken")
    before = load_file(base / "model.safetensors")
    out, tensors, facts = run(base, tmp_path)
    assert all(torch.equal(tensors[name], value) for name, value in before.items())
    assert [path.name for path in tokenizer_files(out)] == ["tekken.json", "tokenizer.json", "tokenizer_config.json"]
    assert facts["tokenizer"] == {"made_from": "tekken.json", "version": "v11", "tokens": 2100}


def test_a_chat_template_that_is_missing_is_named_and_not_invented(dense, tmp_path, caplog):
    base = tekken_base(dense, tmp_path / "base")
    run(base, tmp_path)
    assert "no chat_template.jinja or chat_template.json" in caplog.text


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_chat_template_beside_it_is_taken(name, dense, tmp_path, caplog):
    base = tekken_base(dense, tmp_path / "base")
    (base / name).write_text('{"chat_template": "{{ messages }}"}' if name.endswith("json") else "{{ messages }}")
    out, _, _ = run(base, tmp_path)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert "chat" not in caplog.text


def test_a_damaged_one_ends_before_weights_are_written(dense, tmp_path):
    base = tekken_base(dense, tmp_path / "base")
    (base / "tekken.json").write_text('{"vocab": []}')
    error = refusal(base, tmp_path)
    assert (error.reason, error.about["file"]) == ("TOKENIZER_INVALID", str(base / "tekken.json"))
    assert not list((tmp_path / "work").rglob("*.safetensors"))


def test_without_a_tokenizer_nothing_is_read(dense, tmp_path):
    base = tekken_base(dense, tmp_path / "base")
    (base / "tekken.json").write_text("{")
    out, _, facts = run(base, tmp_path, save_tokenizer=False)
    assert tokenizer_files(out) == []
    assert "tokenizer" not in facts
