"""llama.cpp splits text as the tokenizers of embedders and rerankers do: word pieces, unigrams, and bytes, with the tokens around a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from gguf import GGUFValueType
from tokenizers import Tokenizer, processors

from slipway.errors import GGUFExportError
from slipway.validation.texts import TEXTS, TextKind
from slipway_gguf.metadata import BETWEEN, DIFFERS, Field
from slipway_gguf.vocabulary import read
from slipway_gguf.weights.header import header
from support.models.tokenizers_of_kinds import Vocabulary, save
from support.models.tokenizers_of_readers import KINDS, byte_pairs, settings_of, unigrams, word_pieces

pytestmark = pytest.mark.own_process


def _written(tokenizer: Tokenizer, folder: Path, **settings: str) -> tuple[Path, dict[str, Any]]:
    """Return a file that has a vocabulary only, and its settings by name."""
    folder.mkdir(exist_ok=True)
    save(tokenizer, folder / "model", settings=settings or dict(settings_of(tokenizer)))
    fields = read(folder / "model", rows=tokenizer.get_vocab_size() + 3, reads=True)
    file = folder / "vocabulary.gguf"
    file.write_bytes(header((Field("general.architecture", "llama", GGUFValueType.STRING), *fields), ()))
    return file, {field.key: field.value for field in fields}


def _different(tokenizer: Tokenizer, file: Path) -> set[str]:
    """Return the kinds of text of which llama.cpp has other tokens."""
    theirs = Vocabulary(file)
    marks = dict.fromkeys(settings_of(tokenizer).values())
    texts = [(kind, text) for kind, several in TEXTS.items() for text in several]
    texts += [(TextKind.SPECIAL, f"word{mark}word\n{mark}{mark}") for mark in marks]
    texts += [(TextKind.SPECIAL_SPACES, f"a {mark} b  {mark}\n\n {mark} ") for mark in marks]
    return {kind.value for kind, text in texts if theirs.tokens(text) != tokenizer.encode(text).ids}


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_split_alike_but_for_what_the_file_names(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    file, fields = _written(tokenizer, tmp_path)
    named = set(filter(None, fields.get(DIFFERS, "").split(BETWEEN)))
    assert _different(tokenizer, file) == named


def test_the_tokens_around_a_text_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Qwen3-Embedding ends a text with another token than an answer, and puts none before it."""
    tokenizer = byte_pairs()
    end = tokenizer.token_to_id("[MASK]")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [MASK]", special_tokens=[("[MASK]", end)])
    file, fields = _written(tokenizer, tmp_path, eos_token="[SEP]", pad_token="[PAD]")
    assert fields["tokenizer.ggml.eos_token_id"] == end
    assert (fields["tokenizer.ggml.add_bos_token"], fields["tokenizer.ggml.add_eos_token"]) == (False, True)
    assert Vocabulary(file).tokens("a text") == tokenizer.encode("a text").ids
    assert fields["tokenizer.ggml.add_sep_token"] is False


def test_an_end_that_is_doubled_between_two_texts_is_said(tmp_path: Path) -> None:
    for kind, doubled in (("unigrams", True), ("word pieces", False)):
        _, fields = _written(KINDS[kind](), tmp_path / kind)
        assert fields["tokenizer.ggml.add_sep_token"] is doubled


def _set(part: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        (document[part] if part else document)[key] = value

    return change


_WORDS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "prefix": (_set("model", "continuing_subword_prefix", "@@"), "begin with '@@', and in llama.cpp with ##"),
    "split": (_set("", "pre_tokenizer", {"type": "Whitespace"}), "splits text into words by 'Whitespace'"),
    "normalizer": (_set("", "normalizer", {"type": "Lowercase"}), "changes text before it splits"),
    "chinese": (_set("normalizer", "handle_chinese_chars", False), "handle_chinese_chars of its normalizer is false"),
}
_UNIGRAMS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "bytes": (_set("model", "byte_fallback", True), "write characters without a token as bytes"),
    "unknown": (_set("model", "unk_id", None), "its unknown token is None"),
    "score": (lambda document: document["model"]["vocab"][9].__setitem__(1, None), "score of token 9 is None"),
    "shape": (lambda document: document["model"]["vocab"].append("x"), "which is no text with a score"),
    "split": (_set("", "pre_tokenizer", {"type": "Whitespace"}), "splits text into words by"),
    "lower": (_set("", "normalizer", {"type": "Lowercase"}), "changes text before it splits"),
    "map": (
        lambda document: document["normalizer"]["normalizers"][0].update(precompiled_charsmap="AAAA"),
        "its sizes do not fit",
    ),
    "no-map": (
        lambda document: document["normalizer"]["normalizers"][0].update(precompiled_charsmap="ä"),
        "map of characters of its normalizer cannot be read",
    ),
    "space": (
        lambda document: document["pre_tokenizer"]["pretokenizers"][1].update(prepend_scheme="never"),
        "it writes spaces by",
    ),
    "around": (
        lambda document: document["post_processor"].update(
            single=[*document["post_processor"]["single"], {"SpecialToken": {"id": "<s>", "type_id": 0}}]
        ),
        "at most one token at either end",
    ),
}


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [(word_pieces, *each) for each in _WORDS.values()] + [(unigrams, *each) for each in _UNIGRAMS.values()],
    ids=[*_WORDS, *(f"unigram-{each}" for each in _UNIGRAMS)],
)
def test_what_llama_cpp_cannot_read_alike_is_refused(
    make: Callable[[], Tokenizer], change: Callable[[dict[str, Any]], None], words: str, tmp_path: Path
) -> None:
    tokenizer = make()
    save(tokenizer, tmp_path / "model", settings=dict(settings_of(tokenizer)))
    path = tmp_path / "model" / "tokenizer.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(GGUFExportError, match=words) as caught:
        read(tmp_path / "model", rows=tokenizer.get_vocab_size(), reads=True)
    assert caught.value.reason == "GGUF_TOKENIZER_UNSUPPORTED"
