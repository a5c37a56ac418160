"""Turn a unigram vocabulary of SentencePiece (XLM-RoBERTa) into what llama.cpp reads as ``t5``: tokens with scores, and a map of characters."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from gguf import GGUFValueType as Kind
from gguf import TokenType

from slipway.texts import quoted
from slipway.validation.texts import TextKind
from slipway_gguf.metadata import Field
from slipway_gguf.vocabulary.documents import TokenizerFiles, unsupported_error
from slipway_gguf.vocabulary.tokens import SPACE, TokenList, list_tokens, steps_of

_AT_END = (TextKind.CODE, TextKind.LEADING, TextKind.SPACES, TextKind.SPECIAL, TextKind.SPECIAL_SPACES)
"""Kinds of text that llama.cpp splits otherwise if a tokenizer has a token for the space at the end of a text."""
_UNUSED = -10_000.0
"""Score of a row without a token."""
_LARGEST_MAP = 1 << 24
_MERGED_SPACES = [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": each} for each in (" ", SPACE)]
"""Steps of a normalizer that make one space of several."""
_NO_END = {"type": "Strip", "strip_left": False, "strip_right": True}


def list_unigrams(files: TokenizerFiles, *, rows: int) -> TokenList:
    """List the tokens.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: there is no unknown token, or a byte without a token has one.
    """
    if files.model.get("byte_fallback"):
        raise unsupported_error("its unigrams write characters without a token as bytes, which llama.cpp does not")
    unknown = files.model.get("unk_id")
    listed = files.model["vocab"]
    if not isinstance(unknown, int) or not 0 <= unknown < len(listed):
        raise unsupported_error(f"its unknown token is {quoted(unknown)}, and llama.cpp needs one")
    tokens = list_tokens(files, rows=rows, spaces=False)
    types = tuple(TokenType.UNKNOWN if number == unknown else kind for number, kind in enumerate(tokens.types))
    return TokenList(tokens.texts, types)


def unigram_fields(files: TokenizerFiles, tokens: TokenList) -> tuple[tuple[Field, ...], tuple[TextKind, ...]]:
    """Return the keys of the scores, and of how a tokenizer changes text before it splits, and the kinds of text that llama.cpp splits otherwise.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: it changes or splits text in another way than llama.cpp.
    """
    scores = tuple(_score(files, number) for number in range(len(tokens.texts)))
    mapped, merges, known = _spaces_of(files)
    fields = (
        Field("tokenizer.ggml.scores", scores, Kind.ARRAY, Kind.FLOAT32),
        Field("tokenizer.ggml.add_space_prefix", True, Kind.BOOL),
        Field("tokenizer.ggml.remove_extra_whitespaces", merges, Kind.BOOL),
        *((Field("tokenizer.ggml.precompiled_charsmap", tuple(mapped), Kind.ARRAY, Kind.UINT8),) if mapped else ()),
    )
    return fields, known


def _score(files: TokenizerFiles, number: int) -> float:
    listed = files.model["vocab"]
    if number >= len(listed):
        return 0.0 if number in files.added else _UNUSED
    score = listed[number][1]
    if not isinstance(score, int | float) or isinstance(score, bool):
        raise unsupported_error(f"the score of token {number} is {quoted(score)}, which is no number")
    return float(score)


def _spaces_of(files: TokenizerFiles) -> tuple[bytes, bool, tuple[TextKind, ...]]:
    """Return the map of characters, whether several spaces count as one, and the kinds of text that llama.cpp splits otherwise."""
    steps = steps_of(files.tokenizer.get("normalizer"), "normalizers")
    maps = [step for step in steps if step.get("type") == "Precompiled"]
    other = next((step for step in steps if step not in (*maps, *_MERGED_SPACES, _NO_END)), None)
    if other is not None or len(maps) > 1:
        raise unsupported_error(
            f"it changes text before it splits by {quoted(other or maps)}, which llama.cpp does not"
        )
    words = steps_of(files.tokenizer.get("pre_tokenizer"), "pretokenizers")
    kinds = [step.get("type") for step in words]
    if kinds not in (["WhitespaceSplit", "Metaspace"], ["Metaspace"]):
        raise unsupported_error(f"it splits text into words by {quoted(kinds)}, and llama.cpp at spaces")
    space = words[-1]
    always = space.get("prepend_scheme", "always" if space.get("add_prefix_space", True) else "never") == "always"
    if not always or space.get("replacement", SPACE) != SPACE:
        raise unsupported_error(f"it writes spaces by {quoted(space)}, and llama.cpp one before each text, as {SPACE}")
    by_words = kinds[0] == "WhitespaceSplit"
    merges = by_words or any(step in _MERGED_SPACES for step in steps)
    mapped = _decode_map(maps[0].get("precompiled_charsmap")) if maps else b""
    # The map composes letters and marks; tokenizers apply it to one letter with its marks, and llama.cpp to as much as it holds.
    composed = (TextKind.DECOMPOSED,) if mapped else ()
    return mapped, merges, (*composed, *(() if by_words or _NO_END in steps else _AT_END))


def _decode_map(encoded: Any) -> bytes:
    try:
        data = base64.b64decode(encoded, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise unsupported_error(f"the map of characters of its normalizer cannot be read: {error}") from error
    # llama.cpp reads the map without a check of its parts.
    size = int.from_bytes(data[:4], "little") if len(data) > 4 else 0
    if not 0 < size < len(data) - 4 or size % 4 or len(data) > _LARGEST_MAP or data[-1:] != b"\0":
        raise unsupported_error("the map of characters of its normalizer is none: its sizes do not fit")
    return data
