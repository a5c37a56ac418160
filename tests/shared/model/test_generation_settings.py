"""Settings of generation are found where any version of transformers writes them; a mistake of ours is never the model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipway.errors import is_own_fault
from slipway.model.configuration import first_token, token_of
from slipway.model.folder import ModelFolder


def _write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", **config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"decoder_start_token_id": 7}, None, 7),
        ({"pad_token_id": 0}, {"decoder_start_token_id": 5}, 5),
        ({"decoder_start_token_id": 7}, {"decoder_start_token_id": None}, 7),
        ({"pad_token_id": 3}, {"bos_token_id": 4}, 4),
        ({"pad_token_id": 3}, {}, 3),
        ({}, {}, None),
    ],
    ids=str,
)
def test_a_decoders_first_token(tmp_path: Path, config: Any, generation: Any, expected: int | None) -> None:
    assert first_token(ModelFolder.open(_write(tmp_path, config, generation)).generation_settings()) == expected


def test_a_damaged_generation_config_counts_as_absent(tmp_path: Path) -> None:
    _write(tmp_path, {"pad_token_id": 3}, None)
    (tmp_path / "generation_config.json").write_text("{")
    assert ModelFolder.open(tmp_path).generation_settings()["pad_token_id"] == 3


def test_tokens_of_a_configuration_of_several_parts() -> None:
    import transformers as tf

    whole = tf.Gemma3Config(text_config={"pad_token_id": 5, "eos_token_id": [1, 2]})
    assert token_of(whole, "pad_token_id") == 5
    assert token_of(whole, "eos_token_id") is None
    assert token_of(tf.T5Config(), "decoder_start_token_id") is None


def test_a_mistake_of_ours_is_told_from_a_librarys() -> None:
    import torch
    import transformers as tf

    config, module = tf.T5Config(), torch.nn.Module()
    asked: dict[str, Any] = {"__name__": "slipway_onnx_export.forms.components", "config": config, "module": module}
    for line in ("config.decoder_start_token_id", "module.missing", "missing"):
        assert is_own_fault(_raised(line, asked)), line
    assert not is_own_fault(_raised("config.decoder_start_token_id", asked | {"__name__": "transformers.models.t5"}))
    assert not is_own_fault(_raised("1 / 0", asked))


def _raised(line: str, known: dict[str, Any]) -> BaseException:
    with pytest.raises((AttributeError, NameError, ZeroDivisionError)) as caught:
        eval(line, known)
    return caught.value
