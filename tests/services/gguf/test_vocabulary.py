"""A file's vocabulary gives llama.cpp the tokenizer's own tokens, or the tokenizer is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp splits the texts: pip install 'slipway-ml[gguf]'")
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from slipway.errors import GGUFExportError
from slipway.model.tokens.byte_level import complete_tokenizer
from slipway.validation.texts import TextKind
from slipway_gguf.vocabulary import read
from slipway_gguf.vocabulary.around import read_processor
from slipway_gguf.vocabulary.splitting import KNOWN
from slipway_gguf.vocabulary.tokens import spaces_of
from support.models.tekken import texts, write_tekken
from support.models.tokenizers_of_kinds import (
    MARKS,
    Vocabulary,
    begin_texts,
    byte_level,
    byte_level_by,
    save,
    with_spaces,
    write_vocabulary,
)

pytestmark = pytest.mark.own_process

_QWEN2 = next(expressions for expressions, each in KNOWN.items() if each.pre == "qwen2")
_LLAMA3 = next(expressions for expressions, each in KNOWN.items() if each.whole == "llama-bpe")
_FALCON = next(expressions for expressions, each in KNOWN.items() if each.pre == "falcon")
_FAST = ("gpt-2", "llama-bpe", "qwen2", "tekken")
_NAMES = [
    pytest.param(name, expressions, name == each.whole, id=name, marks=() if name in _FAST else pytest.mark.slow)
    for expressions, each in KNOWN.items()
    for name in filter(None, (each.pre, each.whole))
]


def values(model: Path, *, rows: int = 800) -> dict[str, Any]:
    """Return the values of a model's keys by the last part of their name."""
    return {field.key.rpartition(".")[2]: field.value for field in read(model, rows=rows)}


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Save a tokenizer whose document is changed."""
    save(byte_level(_QWEN2), folder)
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(document)
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("name", "expressions", "whole"), _NAMES)
def test_each_way_to_split_gives_the_tokenizers_tokens(
    name: str, expressions: tuple[str, ...], whole: bool, tmp_path: Path
) -> None:
    tokenizer = byte_level(expressions, whole=whole)
    begin_texts(tokenizer)
    model = save(tokenizer, tmp_path / "model")
    found = values(model)
    assert (found["model"], found["pre"], found["add_bos_token"]) == ("gpt2", name, True)
    file = write_vocabulary(model, tmp_path / "vocabulary.gguf", rows=800)
    assert {kind.value for kind in Vocabulary(file).different(tokenizer)} == set(
        filter(None, found.get("differs", "").split("; "))
    )


@pytest.mark.parametrize("steps", ["template", "template behind bytes", "roberta", "bert", "none"])
def test_a_decoders_tokens_around_a_text_are_read_as_an_embedders_are(steps: str, tmp_path: Path) -> None:
    tokenizer = byte_level(_QWEN2)
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in MARKS[:2]]
    ends = processors.TemplateProcessing(single=f"{MARKS[0]} $A {MARKS[1]}", special_tokens=marks)
    nothing = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.post_processor = {
        "template": ends,
        "template behind bytes": processors.Sequence([processors.ByteLevel(), nothing, ends]),
        "roberta": processors.RobertaProcessing(marks[1], marks[0]),
        "bert": processors.BertProcessing(marks[1], marks[0]),
        "none": nothing,
    }[steps]
    settings = {"bos_token": MARKS[0], "eos_token": MARKS[1], "add_bos_token": True, "add_eos_token": True}
    model = save(tokenizer, tmp_path / "model", settings=settings)
    theirs = Vocabulary(write_vocabulary(model, tmp_path / "vocabulary.gguf", rows=800))
    assert theirs.tokens("some text") == tokenizer.encode("some text").ids
    around = read_processor(json.loads(tokenizer.to_str())["post_processor"])
    assert around is not None
    assert around.single == ((MARKS[0], "", MARKS[1]) if steps != "none" else ("",))


@pytest.mark.parametrize("steps", ["template", "bert"])
def test_a_decoders_tokens_around_a_text_get_the_meaning_that_none_has(steps: str, tmp_path: Path) -> None:
    """BERT's way names neither a token that begins a text nor one that ends it; a class's default in ``config.json`` is no name."""
    tokenizer = byte_level(_QWEN2)
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in MARKS[:2]]
    single = f"{MARKS[0]} $A {MARKS[1]}"
    ends = processors.TemplateProcessing(single=single, special_tokens=marks)
    tokenizer.post_processor = ends if steps == "template" else processors.BertProcessing(marks[1], marks[0])
    model = save(tokenizer, tmp_path / "model", config={"bos_token_id": 1}, settings={"sep_token": MARKS[2]})
    found = values(model)
    assert (found["bos_token_id"], found["eos_token_id"]) == (marks[0][1], marks[1][1])
    assert found["seperator_token_id"] == tokenizer.token_to_id(MARKS[2])
    theirs = Vocabulary(write_vocabulary(model, tmp_path / "vocabulary.gguf", rows=800))
    assert theirs.tokens("some text") == tokenizer.encode("some text").ids


_AROUND = {
    "two before": (f"{MARKS[0]} {MARKS[2]} $A", "at most one token at either end", (False, False)),
    "two behind": (f"{MARKS[0]} $A {MARKS[2]} {MARKS[1]}", "at most one token at either end", (True, False)),
    "another begin": (f"{MARKS[2]} $A {MARKS[1]}", "only its tokens that begin and end one", (False, True)),
    "another end": (f"{MARKS[0]} $A {MARKS[2]}", "only its tokens that begin and end one", (True, False)),
}


@pytest.mark.parametrize("fault", _AROUND)
def test_tokens_that_llama_cpp_cannot_put_around_a_decoders_text_are_not_lost_unsaid(
    fault: str, tmp_path: Path
) -> None:
    """Prompts of a chat template have the tokens that it writes, as in transformers (GLM-4 puts two before other texts)."""
    single, said, ends = _AROUND[fault]
    tokenizer = byte_level(_QWEN2)
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in MARKS]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=marks)
    settings = {"bos_token": MARKS[0], "eos_token": MARKS[1]}
    with pytest.raises(GGUFExportError, match=said) as caught:
        values(save(tokenizer, tmp_path / "plain", settings=settings))
    assert caught.value.reason == "GGUF_TOKENIZER_UNSUPPORTED"
    assert "bos_token" in caught.value.remedy
    model = save(tokenizer, tmp_path / "chat", settings={**settings, "chat_template": "{{ messages }}"})
    warnings: list[str] = []
    found = {field.key: field.value for field in read(model, rows=800, warn=warnings.append)}
    assert [said in each for each in warnings] == [True]
    assert (found["tokenizer.ggml.add_bos_token"], found["tokenizer.ggml.add_eos_token"]) == ends
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.eos_token_id"]) == (marks[0][1], marks[1][1])


@pytest.mark.slow
def test_steps_behind_the_one_that_writes_bytes_split_as_expressions_do(tmp_path: Path) -> None:
    """As Falcon's tokenizer lists them."""
    digits, threes = (
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex(_FALCON[-1]), "isolated"),
    )
    steps = [pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(add_prefix_space=False), digits, threes]
    tokenizer = byte_level_by(steps)
    model = save(tokenizer, tmp_path / "model")
    assert values(model)["pre"] == "falcon"
    file = write_vocabulary(model, tmp_path / "vocabulary.gguf", rows=800)
    assert Vocabulary(file).different(tokenizer) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-llm", "deepseek-coder"])
def test_digits_that_a_step_takes_apart_are_those_of_an_expression(name: str, tmp_path: Path) -> None:
    """As DeepSeek's first tokenizers list them; llama.cpp's expression for the first takes several digits together, which no token does."""
    *expressions, _ = next(expressions for expressions, each in KNOWN.items() if each.pre == name)
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer = byte_level_by([*splits, digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    model = save(tokenizer, tmp_path / "model")
    assert values(model)["pre"] == name
    file = write_vocabulary(model, tmp_path / "vocabulary.gguf", rows=800)
    assert Vocabulary(file).different(tokenizer) == set()


@pytest.mark.parametrize("version", ["v3", "v13"])
def test_a_tokenizer_made_from_tekken_json_gives_the_tokenizers_tokens(version: str, tmp_path: Path) -> None:
    model = write_tekken(tmp_path / "model", version)
    complete_tokenizer(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows = tokenizer.get_vocab_size()
    found = values(model, rows=rows)
    assert (found["pre"], found["add_bos_token"]) == ("tekken", True)
    assert (found["bos_token_id"], found["eos_token_id"]) == (1, 2)
    vocabulary = Vocabulary(write_vocabulary(model, tmp_path / "vocabulary.gguf", rows=rows))
    assert {kind.value for kind in vocabulary.different(tokenizer)} <= set(found["differs"].split("; "))
    different = [text for text in texts() if vocabulary.tokens(text) != tokenizer.encode(text).ids]
    # Runs of letters with and without case, and what Unicode counts as a space and llama.cpp does not.
    assert [text for text in different if text.isascii()] == []
    assert len(different) < len(texts()) // 4


@pytest.mark.parametrize("prefix", ["", "legacy", "always", "first"])
def test_a_vocabulary_with_spaces_gives_the_tokenizers_tokens(prefix: str, tmp_path: Path) -> None:
    tokenizer = with_spaces(prefix=prefix)
    begin_texts(tokenizer)
    model = save(tokenizer, tmp_path / "model")
    found = values(model)
    assert (found["model"], found["add_space_prefix"], found["token_type"][0]) == ("llama", bool(prefix), 2)
    file = write_vocabulary(model, tmp_path / "vocabulary.gguf", rows=800)
    different = {kind.value for kind in Vocabulary(file).different(tokenizer)}
    assert different == set(filter(None, found.get("differs", "").split("; ")))
    assert not different & {TextKind.WORDS, TextKind.EMOJI, TextKind.CODE}


def test_the_wrong_name_of_a_way_to_split_gives_other_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level(_LLAMA3, whole=True)
    model = save(tokenizer, tmp_path / "model")
    file = write_vocabulary(model, tmp_path / "vocabulary.gguf", rows=800, pre="gpt-2")
    assert TextKind.DIGITS in Vocabulary(file).different(tokenizer)


def test_text_that_transformers_composes_first_is_named(tmp_path: Path) -> None:
    tokenizer = byte_level(_QWEN2, normalizer=normalizers.NFC())
    model = save(tokenizer, tmp_path / "model")
    assert values(model)["differs"] == TextKind.DECOMPOSED.value
    file = write_vocabulary(model, tmp_path / "vocabulary.gguf", rows=800)
    assert Vocabulary(file).different(tokenizer) == {TextKind.DECOMPOSED}


def test_rows_without_a_token_are_filled_and_texts_occur_once(tmp_path: Path) -> None:
    """llama.cpp ends the process at two tokens of one text."""

    def repeat(document: dict[str, Any]) -> None:
        vocabulary, merges = document["model"]["vocab"], document["model"]["merges"]
        unused = next(text for text in vocabulary if len(text) == 1 and not any(text in merge for merge in merges))
        document["added_tokens"].append(_added(len(vocabulary) + 1, unused))
        document["added_tokens"].append(_added(len(vocabulary) + 2, "[PAD750]"))

    model = changed(tmp_path / "model", repeat)
    found = values(model)
    assert len(found["tokens"]) == len(set(found["tokens"])) == 800
    assert found["tokens"][750] == "[PAD750]_"
    assert (found["tokens"][799], found["token_type"][799]) == ("[PAD799]", 5)
    Vocabulary(write_vocabulary(model, tmp_path / "vocabulary.gguf", rows=800))


def _added(number: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": content, **flags}


def test_ends_of_texts_and_turns_are_told_apart(tmp_path: Path) -> None:
    """A chat model ends a turn by another token than a text, and names both only for generation."""
    tokenizer = byte_level(_QWEN2)
    begin, end, turn = (tokenizer.token_to_id(mark) for mark in MARKS)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|eom_id|>", "<|fim_prefix|>")])
    template = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
    model = save(
        tokenizer,
        tmp_path / "model",
        settings={"eos_token": {"content": MARKS[1]}, "pad_token": "<think>", "chat_template": template},
        generation_config={"bos_token_id": begin, "eos_token_id": [turn, end, 10**9]},
        config={"eos_token_id": end},
    )
    found = values(model)
    assert (found["bos_token_id"], found["eos_token_id"], found["eot_token_id"]) == (begin, end, turn)
    assert found["padding_token_id"] == tokenizer.token_to_id("<think>")
    assert found["eom_token_id"] == tokenizer.token_to_id("<|eom_id|>")
    assert found["fim_pre_token_id"] == tokenizer.token_to_id("<|fim_prefix|>")
    assert (found["add_bos_token"], found["add_eos_token"]) == (False, False)
    types = dict(zip(found["tokens"], found["token_type"], strict=True))
    assert (types["<|end|>"], types["<think>"], types["a"]) == (3, 4, 1)


def test_the_end_of_a_message_is_no_end_of_a_turn(tmp_path: Path) -> None:
    """Llama 3.1 names three ends, and its template writes two of them."""
    tokenizer = byte_level(_LLAMA3, whole=True)
    tokenizer.add_special_tokens(["<|eom_id|>", "<|eot_id|>"])
    text, message, turn = (tokenizer.token_to_id(mark) for mark in (MARKS[1], "<|eom_id|>", "<|eot_id|>"))
    model = save(
        tokenizer,
        tmp_path / "model",
        settings={"eos_token": "<|eot_id|>", "chat_template": "{{ '<|eom_id|>' if messages else '<|eot_id|>' }}"},
        generation_config={"eos_token_id": [text, message, turn]},
    )
    found = values(model)
    assert (found["eos_token_id"], found["eot_token_id"], found["eom_token_id"]) == (turn, turn, message)


def test_chat_templates_are_taken_as_transformers_takes_them(tmp_path: Path) -> None:
    listed = [
        {"name": "default", "template": "A"},
        {"name": "tool_use", "template": "B"},
        {"name": "Not ok", "template": "C"},
    ]
    model = save(byte_level(_QWEN2), tmp_path / "model", settings={"chat_template": listed})
    assert (values(model)["chat_template"], values(model)["chat_templates"], values(model)["tool_use"]) == (
        "A",
        ("tool_use",),
        "B",
    )
    (model / "chat_template.jinja").write_text("D", encoding="utf-8")
    assert values(model)["chat_template"] == "D"


def test_no_template_is_none(tmp_path: Path) -> None:
    assert "chat_template" not in values(save(byte_level(_QWEN2), tmp_path / "model"))


def _set(part: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: (document[part] if part else document).__setitem__(key, value)


def _nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "ByteLevel"}
    for _ in range(depth):
        found = {"type": "Sequence", "pretokenizers": [found]}
    return found


_OTHER = {"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}{1,2}"}, "behavior": "Isolated", "invert": False}
_REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "unknown-split": (_set("", "pre_tokenizer", _OTHER), r"no name for how .*\\p{N}{1,2}.*nearest that it has is '"),
    "no-split": (_set("", "pre_tokenizer", None), "pre-tokenizer is None"),
    "other-step": (_set("", "pre_tokenizer", {"type": "Whitespace"}), "no pre-tokenizer like 'Whitespace'"),
    "removed": (_set("", "pre_tokenizer", {**_OTHER, "behavior": "Removed"}), "which llama.cpp cannot"),
    "prefixed": (_set("", "pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True}), "add_prefix_space"),
    "nested": (_set("", "pre_tokenizer", _nested(20)), "splits nothing that llama.cpp knows"),
    "lower-case": (_set("", "normalizer", {"type": "Lowercase"}), "changes text before it splits .'Lowercase'"),
    "words": (_set("model", "type", "WordLevel"), "kind 'WordLevel'"),
    "twice": (_set("model", "vocab", {"a": 0, "b": 0}), "two tokens of the vocabulary have the number 0"),
    "negative": (_set("model", "vocab", {"a": -1}), "has the number -1"),
    "large": (_set("model", "vocab", {"a": 1 << 40}), "has the number"),
    "no-number": (_set("model", "vocab", {"a": "0"}), "has the number '0'"),
    "nul": (_set("", "added_tokens", [_added(3, "a\0b")]), "without NUL"),
    "no-token": (_set("", "added_tokens", ["x"]), "among its added tokens"),
    "rows": (_set("", "added_tokens", [_added(800, "more")]), "the number 800, and the embedding has 800 rows"),
    "merge": (_set("model", "merges", [["a", "☃"]]), "are no tokens"),
    "merge-shape": (_set("model", "merges", [["a"]]), "among its merges"),
    "no-merges": (_set("model", "merges", None), "no list"),
}


_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_BEGIN = {"type": "Prepend", "prepend": "▁"}
_META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
_CHANGED: dict[str, tuple[list[dict[str, Any]], dict[str, Any] | None, str]] = {
    "line-ends": ([{**_SPACE, "pattern": {"String": "\n"}, "content": " "}, _SPACE], None, "before it splits"),
    "expression": ([{**_SPACE, "pattern": {"Regex": " +"}}], None, "before it splits"),
    "other-mark": ([_SPACE, {**_SPACE, "content": "_"}], None, "before it splits"),
    "composed": ([{"type": "NFC"}, _SPACE], None, "'NFC'"),
    "twice": ([_BEGIN, _BEGIN, _SPACE], None, "only a space"),
    "word": ([{**_BEGIN, "prepend": "a"}, _SPACE], None, "only a space"),
    "both": ([_BEGIN], _META, "twice"),
    "underscore": ([], {**_META, "replacement": "_"}, "as '_'"),
}


@pytest.mark.parametrize("fault", _CHANGED)
def test_a_vocabulary_with_spaces_changes_nothing_else(fault: str) -> None:
    steps, pre, said = _CHANGED[fault]
    normalizer = {"type": "Sequence", "normalizers": steps}
    with pytest.raises(GGUFExportError, match=said):
        spaces_of({"normalizer": normalizer, "pre_tokenizer": pre})


def test_a_vocabulary_with_spaces_has_a_token_for_each_byte(tmp_path: Path) -> None:
    """llama.cpp ends the process at a character that has neither."""
    model = save(with_spaces(), tmp_path / "model")
    document = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    del document["model"]["vocab"]["<0x0A>"]
    document["added_tokens"] = [each for each in document["added_tokens"] if each["content"] != "<0x0A>"]
    (model / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(GGUFExportError, match="no token for 1 of 256 bytes, first <0x0A>") as caught:
        read(model, rows=800)
    assert caught.value.reason == "GGUF_TOKENIZER_UNSUPPORTED"


@pytest.mark.parametrize("fault", _REFUSED)
def test_what_llama_cpp_cannot_read_alike_is_refused(fault: str, tmp_path: Path) -> None:
    change, said = _REFUSED[fault]
    with pytest.raises(GGUFExportError, match=said) as caught:
        read(changed(tmp_path / "model", change), rows=800)
    assert caught.value.reason == "GGUF_TOKENIZER_UNSUPPORTED"
    assert caught.value.remedy


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(GGUFExportError, match=r"no tokenizer\.json"):
        read(tmp_path, rows=800)
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(GGUFExportError, match="a pipe"):
        read(tmp_path, rows=800)
