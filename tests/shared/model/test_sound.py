"""Models that answer with tokens of sound are told by their tokenizer, and others are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="tokenizers are made: pip install 'slipway-ml[prepare]'")
pytest.importorskip("gguf", reason="the trained tokenizer comes with the tests of GGUF")

from slipway.model.tokens.sound import SOUND_CODECS, SoundCodec, sound_codec
from support.models.sound_models import sound_tokenizer
from support.models.tiny_models import save_tokenizer


@pytest.mark.parametrize("codec", SOUND_CODECS, ids=lambda codec: codec.name)
def test_each_codec_is_known_by_its_tokens(codec: SoundCodec, tmp_path: Path) -> None:
    sound_tokenizer(codec, tmp_path)
    assert sound_codec(tmp_path) is codec


def test_a_few_such_tokens_are_none(tmp_path: Path) -> None:
    sound_tokenizer(SOUND_CODECS[0], tmp_path, count=999)
    assert sound_codec(tmp_path) is None


def test_the_mark_is_needed_where_others_have_such_tokens(tmp_path: Path) -> None:
    codec = next(each for each in SOUND_CODECS if each.name == "XCodec2")
    sound_tokenizer(codec, tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("SPEECH_GENERATION_START", "sos"), encoding="utf-8")
    assert sound_codec(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", json.dumps({"model": "<custom_token_" * 1000}), json.dumps(["<custom_token_1>"] * 1000)])  # fmt: skip
def test_what_is_no_tokenizer_has_no_codec(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert sound_codec(tmp_path) is None
    assert sound_codec(tmp_path / "missing") is None


def test_a_tokenizer_of_text_has_no_codec(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert sound_codec(tmp_path) is None
