"""The converted tokenizer against transformers' on hard texts: what differs is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from slipway.stage import Context
from slipway.validation.texts import CONVERSATIONS
from slipway.validation.texts import TEXTS as HARD_TEXTS
from slipway_openvino.tokenizers import compare, write_tokenizer
from support.hostile.endless import GROWS
from support.models.talking_templates import ITEMS, REPEATS, TALKS

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>{% endfor %}"
TEXTS = [
    *(text for texts in HARD_TEXTS.values() for text in texts),
    "the cat sat on the mat and it was 12 years old; don't you know?",
]


def byte_level(*, pattern: str = "") -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, plain])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained(tokenizer, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=["<eos>"]))
    return tokenizer


def trained(tokenizer: Tokenizer, trainer: trainers.Trainer) -> None:
    tokenizer.train_from_iterator(TEXTS, trainer)


def qwen() -> Tokenizer:
    tokenizer = byte_level(pattern=QWEN)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def sentence_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained(tokenizer, trainers.BpeTrainer(vocab_size=600, special_tokens=special, limit_alphabet=80))
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["<eos>", "[UNK]", "[CLS]", "[SEP]"]
    trained(tokenizer, trainers.WordPieceTrainer(vocab_size=500, special_tokens=special))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": byte_level,
    "Qwen": qwen,
    "SentencePiece": sentence_piece,
    "BERT": word_piece,
}


def save(kind: str, folder: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), eos_token="<eos>").save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen", "SentencePiece", "BERT"])
def test_tokens_and_texts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path)
    ctx = Context(workdir=tmp_path, log=logging.getLogger("test"))
    record = write_tokenizer(tmp_path, ctx)
    differing = {"differing": {"splits text": ["letters of two cases"]}} if kind == "BERT" else {}
    assert record == {"converted": True, "compared": sum(map(len, HARD_TEXTS.values())), **differing}
    assert ctx.facts["prompts_compared"] is False
    assert len(ctx.facts.get("warnings", ())) == len(differing)
    assert (tmp_path / "openvino_tokenizer.xml").is_file()


def test_a_tokenizer_is_written_with_the_same_bytes_again(tmp_path: Path) -> None:
    """OpenVINO names nodes and ports by a counter of the process, which goes on between the two."""
    written = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        save("GPT-2", tmp_path / name)
        write_tokenizer(tmp_path / name, Context(workdir=tmp_path, log=logging.getLogger("test")))
        written.append({file.name: file.read_bytes() for file in (tmp_path / name).glob("openvino_*")})
    assert len(written[0]) == 4
    assert written[0] == written[1]


def test_installed_packages_that_have_no_part_are_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """openvino-tokenizers write the versions of all packages that they know; bytes would depend on where a worker runs."""
    from openvino_tokenizers import utils

    found = utils.get_package_version
    monkeypatch.setattr(
        utils, "get_package_version", lambda name: "1.2.3" if name in ("tiktoken", "sentencepiece") else found(name)
    )
    save("GPT-2", tmp_path)
    write_tokenizer(tmp_path, Context(workdir=tmp_path, log=logging.getLogger("test")))
    for name in ("openvino_tokenizer.xml", "openvino_detokenizer.xml"):
        said = (tmp_path / name).read_text()
        assert "tokenizers_version" in said
        assert "1.2.3" not in said


def test_a_tokenizer_that_splits_otherwise_is_not_delivered(tmp_path: Path) -> None:
    """openvino-tokenizers splits runs of punctuation, which this one keeps."""
    tokenizer = byte_level()
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation("contiguous"), plain])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(tmp_path)
    ctx = Context(workdir=tmp_path, log=logging.getLogger("test"))
    record = write_tokenizer(tmp_path, ctx)
    assert record["converted"] is False
    assert "code" in record["differing"]["splits text"]
    assert "digits" not in record["differing"]["splits text"]
    assert "joins tokens" not in record["differing"]
    assert "splits text otherwise than transformers: " in ctx.facts["warnings"][0]
    assert not list(tmp_path.glob("openvino_*"))


def test_a_chat_template_that_is_rendered_otherwise_is_found(tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai", reason="openvino-genai is not installed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(tmp_path)
    ctx = Context(workdir=tmp_path, log=logging.getLogger("test"))
    assert write_tokenizer(tmp_path, ctx)["converted"] is True
    assert ctx.facts["prompts_compared"] is True
    tokenizer.chat_template = TEMPLATE.replace("<eos>", "</s>")
    taken = [name for name, each in CONVERSATIONS.items() if not each.needs]
    assert set(compare(tmp_path, tokenizer)["writes prompts"]) == set(taken)


def test_calls_of_tools_and_switches_of_thinking_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai", reason="openvino-genai is not installed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>", chat_template=TALKS)
    tokenizer.save_pretrained(tmp_path)
    ctx = Context(workdir=tmp_path, log=logging.getLogger("test"))
    assert write_tokenizer(tmp_path, ctx)["converted"] is True
    assert ctx.facts["prompts_differing"] == []
    assert "warnings" not in ctx.facts
    tokenizer.chat_template = REPEATS
    (names,) = compare(tmp_path, tokenizer).values()
    assert names[0] == "a tool's call and its result"
    assert len(names) == 3


def test_another_prompt_of_a_tools_call_is_a_warning_that_names_the_shortest(tmp_path: Path) -> None:
    """openvino-genai 2026.4 writes JSON of its own where it takes a template for one without calls, such as one that goes through their arguments."""
    pytest.importorskip("openvino_genai", reason="openvino-genai is not installed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>", chat_template=ITEMS)
    tokenizer.save_pretrained(tmp_path)
    ctx = Context(workdir=tmp_path, log=logging.getLogger("test"))
    assert write_tokenizer(tmp_path, ctx)["converted"] is True
    assert len(ctx.facts["prompts_differing"]) == 3
    assert "the shortest is a tool's call and its result" in ctx.facts["warnings"][0]


def test_a_chat_template_without_end_is_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai", reason="openvino-genai is not installed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>", chat_template=GROWS)
    tokenizer.save_pretrained(tmp_path)
    ctx = Context(workdir=tmp_path, log=logging.getLogger("test"))
    assert write_tokenizer(tmp_path, ctx)["converted"] is False
    assert "chat template needs more than 1.1 GB of memory" in ctx.facts["warnings"][0]


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_converted_is_a_warning(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.UnicodeScripts()
    trained(tokenizer, trainers.BpeTrainer(vocab_size=100, special_tokens=["<eos>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(tmp_path)
    ctx = Context(workdir=tmp_path, log=logging.getLogger("test"))
    record = write_tokenizer(tmp_path, ctx)
    assert record["converted"] is False
    assert "openvino-genai cannot run the folder" in ctx.facts["warnings"][0]
    assert not list(tmp_path.glob("openvino_*"))
