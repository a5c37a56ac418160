"""Small trained tokenizers of each kind that a GGUF file can hold, and llama.cpp's tokens of a text."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from slipway.validation.texts import TEXTS, TextKind
from slipway_gguf.runtime.llama import Llama
from slipway_gguf.vocabulary import read

MARKS = ("<s>", "</s>", "<|end|>")
_CORPUS = [text for several in TEXTS.values() for text in several]


def byte_level(expressions: Sequence[str], *, whole: bool = False, normalizer: Any = None) -> Tokenizer:
    """Train a tokenizer of bytes that splits by these expressions, one after the other."""
    steps = [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]
    written = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level_by([*steps, written], whole=whole, normalizer=normalizer)


def byte_level_by(steps: Sequence[Any], *, whole: bool = False, normalizer: Any = None) -> Tokenizer:
    """Train a tokenizer of bytes that splits by these steps, of which one writes bytes as characters."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(MARKS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return tokenizer


def with_spaces(*, prefix: str = "") -> Tokenizer:
    """Train a tokenizer in the manner of SentencePiece: a space is a character, and a byte without a token is ``<0xHH>``.

    Args:
        prefix: How a space is put before a text: ``legacy`` (by the normalizer), ``first`` or ``always`` (by the pre-tokenizer).
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prefix in ("", "legacy"):
        steps = [normalizers.Prepend("▁")] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    words = [word for text in _CORPUS for word in text.replace(" ", " ▁").split(" ") if word]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", *MARKS, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
        max_token_length=8,
    )
    learner = Tokenizer(models.BPE())
    learner.train_from_iterator(words, trainer)
    document, learnt = json.loads(tokenizer.to_str()), json.loads(learner.to_str())
    document["model"] |= {key: learnt["model"][key] for key in ("vocab", "merges")}
    document["model"] |= {"vocab": _without_rare(document["model"])}
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    return tokenizer


def _without_rare(model: dict[str, Any]) -> dict[str, int]:
    """Return a vocabulary in which characters of emoji have no token, so that their bytes do."""
    return {text: number for text, number in model["vocab"].items() if not (len(text) == 1 and ord(text) > 0x1F000)}


def begin_texts(tokenizer: Tokenizer) -> None:
    """Put the begin of a text before each."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{MARKS[0]} $A", special_tokens=[(MARKS[0], tokenizer.token_to_id(MARKS[0]))]
    )


def save(tokenizer: Tokenizer, folder: Path, *, settings: dict[str, Any] | None = None, **files: Any) -> Path:
    """Save a tokenizer as a model's folder has it; ``files`` are further documents, such as ``generation_config``."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": MARKS[0], "eos_token": MARKS[1]} if settings is None else settings
    for name, document in {"tokenizer_config": settings, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def write_vocabulary(model: Path, file: Path, *, rows: int, **changed: Any) -> Path:
    """Write a GGUF file that has a vocabulary only. ``changed`` replaces values by the last part of their key."""
    writer = gguf.GGUFWriter(file, "llama")
    for field in read(model, rows=rows):
        value = changed.get(field.key.rpartition(".")[2], field.value)
        if value is not None:
            writer.add_key_value(field.key, list(value) if isinstance(value, tuple) else value, field.kind, field.item)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


class Vocabulary:
    """The vocabulary of a file in llama.cpp."""

    def __init__(self, file: Path) -> None:
        self._llama = Llama()
        params = self._llama.functions.llama_model_default_params()
        params.vocab_only = True
        self._model = self._llama.functions.llama_model_load_from_file(str(file).encode(), params)
        assert self._model, self._llama.errors()
        self._vocabulary = self._llama.functions.llama_model_get_vocab(self._model)

    def tokens(self, text: str) -> list[int]:
        """Return llama.cpp's tokens of a text."""
        data = text.encode()
        room = len(data) + 16
        ids = (ctypes.c_int32 * room)()
        count = self._llama.functions.llama_tokenize(self._vocabulary, data, len(data), ids, room, True, True)
        assert count >= 0
        return list(ids[:count])

    def different(self, tokenizer: Tokenizer) -> set[TextKind]:
        """Return the kinds of text of which llama.cpp has other tokens than the tokenizer."""
        texts = [(kind, text) for kind, several in TEXTS.items() for text in several]
        texts += [(TextKind.SPECIAL, f"a{mark}b\n{mark}{mark}") for mark in (*MARKS, "<think>")]
        texts += [(TextKind.SPECIAL_SPACES, f"a {mark} b  {mark}\n") for mark in MARKS]
        return {kind for kind, text in texts if self.tokens(text) != tokenizer.encode(text).ids}
