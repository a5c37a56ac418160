"""Tokenizers of translators, whose files are sentencepiece's: ``[all]`` has what reads them."""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

import pytest

from slipway_validate.runner.sampling.making import load_tokenizer
from support.commands.light_install import light_distributions


@pytest.fixture
def marian(tmp_path: Path) -> Path:
    """Make the tokenizer of a Marian as its authors publish it: two sentencepiece models and one vocabulary."""
    import sentencepiece

    (tmp_path / "text.txt").write_text("\n".join(pydoc_data.topics.topics["lists"].split(". ")))
    for name in ("source", "target"):
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / name), vocab_size=60, minloglevel=2,
            hard_vocab_limit=False,
        )  # fmt: skip
        (tmp_path / f"{name}.model").rename(tmp_path / f"{name}.spm")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
    names = ["</s>", "<unk>", *(pieces.id_to_piece(index) for index in range(3, len(pieces))), "<pad>"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: index for index, name in enumerate(names)}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "marian"}))
    settings = {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_the_tokenizer_of_a_translator_is_read(marian: Path) -> None:
    tokenizer = load_tokenizer(marian)
    tokens = tokenizer("the list")["input_ids"]
    assert tokens[-1] == 0
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "the list"


@pytest.mark.parametrize("extra", ["validate", "quantize", "openvino", "all"])
def test_the_extras_of_stages_that_read_tokenizers_bring_sentencepiece(extra: str) -> None:
    assert "sentencepiece" in light_distributions(extra)
