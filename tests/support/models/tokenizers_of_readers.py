"""Small trained tokenizers of models that read whole texts: word pieces as BERT's, unigrams as XLM-RoBERTa's, bytes as ModernBERT's."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from slipway.validation.texts import TEXTS

_CORPUS = [text for several in TEXTS.values() for text in several]
_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def word_pieces(*, lowercase: bool = True) -> Tokenizer:
    """Return a trained tokenizer of word pieces."""
    return Tokenizer.from_str(_word_pieces(lowercase=lowercase))


def unigrams(*, words: bool = True) -> Tokenizer:
    """Return a trained tokenizer of unigrams with SentencePiece's map of characters, in the form that transformers makes of it.

    Args:
        words: Whether text is split at spaces first, as transformers' class does; otherwise a step of the normalizer joins spaces.
    """
    return Tokenizer.from_str(_unigrams(words=words))


def byte_pairs() -> Tokenizer:
    """Return a trained tokenizer of bytes with the marks of BERT."""
    return Tokenizer.from_str(_byte_pairs())


@cache
def _word_pieces(*, lowercase: bool) -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token=_BERT[1]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=list(_BERT), show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return _surround(tokenizer, _BERT[2], _BERT[3])


@cache
def _unigrams(*, words: bool) -> str:
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(_CORPUS * 4),
        model_writer=made,
        vocab_size=460,
        model_type="unigram",
        character_coverage=0.995,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
        hard_vocab_limit=False,
    )
    # The module makes its classes when it is imported, so no checker knows them.
    model = sentencepiece_model_pb2.ModelProto.FromString(made.getvalue())  # type: ignore[attr-defined]
    pieces = [(each.piece, each.score) for each in model.pieces][3:]
    vocabulary = [*((text, 0.0) for text in _ROBERTA[:4]), *pieces, (_ROBERTA[4], 0.0)]
    document = json.loads(Tokenizer(models.Unigram(vocabulary, unk_id=3)).to_str())
    mapped = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
    steps: list[dict[str, Any]] = [{"type": "Precompiled", "precompiled_charsmap": mapped}]
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    before: list[dict[str, Any]] = [{"type": "WhitespaceSplit"}] if words else []
    if not words:
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    document["normalizer"] = {"type": "Sequence", "normalizers": steps}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*before, space]}
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.add_special_tokens(list(_ROBERTA))
    return _surround(tokenizer, _ROBERTA[0], _ROBERTA[2], doubled=True)


@cache
def _byte_pairs() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(_BERT), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return _surround(tokenizer, _BERT[2], _BERT[3])


def _surround(tokenizer: Tokenizer, begin: str, end: str, *, doubled: bool = False) -> str:
    """Put the tokens around texts and pairs, and return the tokenizer as its file has it."""
    between = f"{end} {end}" if doubled else end
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {between} $B {end}",
        special_tokens=[(each, tokenizer.token_to_id(each)) for each in (begin, end)],
    )
    return str(tokenizer.to_str())


def settings_of(tokenizer: Tokenizer) -> Mapping[str, str]:
    """Return the special tokens of a tokenizer, as its settings name them."""
    names = ("pad", "unk", "cls", "sep", "mask") if tokenizer.token_to_id(_BERT[2]) is not None else ()
    if names:
        return {f"{name}_token": text for name, text in zip(names, _BERT, strict=True)}
    begin, pad, end, unknown, mask = _ROBERTA
    around = {"bos_token": begin, "cls_token": begin, "eos_token": end, "sep_token": end}
    return {**around, "pad_token": pad, "unk_token": unknown, "mask_token": mask}


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "word pieces": word_pieces,
    "word pieces in two cases": lambda: word_pieces(lowercase=False),
    "unigrams": unigrams,
    "unigrams without words": lambda: unigrams(words=False),
    "byte pairs": byte_pairs,
}
"""Makers by kind."""
