"""Turn a vocabulary of word pieces (BERT) into what llama.cpp reads as ``bert``: the first piece of a word begins with a space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import GGUFValueType as Kind

from slipway.texts import quoted
from slipway.validation.texts import TextKind
from slipway_gguf.metadata import Field
from slipway_gguf.vocabulary.documents import TokenizerFiles, unsupported_error
from slipway_gguf.vocabulary.tokens import SPACE, TokenList, list_tokens

INNER = "##"
"""Beginning of a piece that is not the first of a word."""
_UNMARKED = (TextKind.MARKS, TextKind.CJK)
"""Kinds of text that llama.cpp splits otherwise if accents are removed: it also removes vowel signs, and the second and third letters of Hangul."""


def list_pieces(files: TokenizerFiles, *, rows: int) -> TokenList:
    """List the tokens.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: it splits words, or writes pieces, in another way than llama.cpp.
    """
    if files.model.get("continuing_subword_prefix", INNER) != INNER:
        what = quoted(files.model.get("continuing_subword_prefix"))
        raise unsupported_error(f"pieces within a word begin with {what}, and in llama.cpp with {INNER}")
    pre = files.tokenizer.get("pre_tokenizer")
    kind = pre.get("type") if isinstance(pre, dict) else pre
    if kind != "BertPreTokenizer":
        raise unsupported_error(f"it splits text into words by {quoted(kind)}, and llama.cpp as BERT does")
    return list_tokens(files, rows=rows, spaces=False, spell=_spell)


def _spell(text: str) -> str:
    return text.removeprefix(INNER) if text.startswith(INNER) else SPACE + text


def word_fields(files: TokenizerFiles) -> tuple[tuple[Field, ...], tuple[TextKind, ...]]:
    """Return the keys of how a tokenizer changes text before it splits, and the kinds of text that llama.cpp splits otherwise.

    One of these is long words: tokenizers take words of more than 100 characters for unknown, and llama.cpp splits them.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: it changes text in another way than BERT's.
    """
    normalizer = files.tokenizer.get("normalizer")
    settings: Mapping[str, Any] = normalizer if isinstance(normalizer, dict) else {}
    if settings.get("type") != "BertNormalizer":
        raise unsupported_error(f"it changes text before it splits by {quoted(normalizer)}, and llama.cpp as BERT does")
    for key in ("clean_text", "handle_chinese_chars"):
        if settings.get(key) is False:
            raise unsupported_error(f"{key} of its normalizer is false, which llama.cpp does not know")
    lower = bool(settings.get("lowercase", True))
    named = settings.get("strip_accents")
    strips = lower if named is None else bool(named)
    fields = (
        Field("tokenizer.ggml.normalizer.lowercase", lower, Kind.BOOL),
        Field("tokenizer.ggml.normalizer.strip_accents", strips, Kind.BOOL),
    )
    return fields, (TextKind.LONG, *(_UNMARKED if strips else ()))
