"""List the tokens of a vocabulary by number, as llama.cpp needs them: each text once, each of a type."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gguf import TokenType

from slipway_gguf.vocabulary.documents import TokenizerFiles, unsupported

SPACE = "▁"
"""The character that stands for a space in vocabularies in the manner of SentencePiece."""
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True)
class TokenList:
    """The tokens by number.

    Attributes:
        texts: Their texts.
        types: Their types.
    """

    texts: tuple[str, ...]
    types: tuple[TokenType, ...]


def list_tokens(files: TokenizerFiles, *, rows: int, spaces: bool) -> TokenList:
    """List the tokens.

    Args:
        files: The tokenizer.
        rows: Rows of the embedding, as many as there must be tokens: numbers without a token are filled.
        spaces: Whether a space is written as :data:`SPACE`, and a byte that has no token as ``<0xHH>``.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: there are more tokens than rows, or bytes without a token.
    """
    if spaces:
        _check_bytes(files)
    highest = max([*files.vocabulary.values(), *files.added])
    if highest >= rows:
        raise unsupported(
            f"the tokenizer has a token with the number {highest}, and the embedding has {rows} rows",
            "give the tokenizer of this model, or resize its embedding",
        )
    known = {number: (text, _type(text, files, spaces=spaces)) for text, number in files.vocabulary.items()}
    for number, added in files.added.items():
        # llama.cpp looks for such a token in the text as it was given, where a space is a space.
        text = added.content.replace(SPACE, " ") if spaces and not added.special else added.content
        is_unknown = added.content == files.model.get("unk_token") and spaces
        special = TokenType.UNKNOWN if is_unknown else TokenType.CONTROL
        known[number] = (text, special if added.special else TokenType.USER_DEFINED)
    taken = _owners(known, files)
    texts, types = [], []
    for number in range(rows):
        text, kind = known.get(number, ("", TokenType.UNUSED))
        if not text or taken[text] != number:  # llama.cpp ends the process if two tokens have one text
            text, kind = f"[PAD{number}]", TokenType.UNUSED
            while text in taken:
                text += "_"
            taken[text] = number
        texts.append(text)
        types.append(kind)
    return TokenList(tuple(texts), tuple(types))


def _check_bytes(files: TokenizerFiles) -> None:
    """Refuse a vocabulary in which a byte has no token: llama.cpp ends the process at a character that has none either."""
    known = files.vocabulary.keys() | {added.content for added in files.added.values()}
    lacking = [text for text in (f"<0x{byte:02X}>" for byte in range(256)) if text not in known]
    if lacking:
        raise unsupported(
            f"its vocabulary has no token for {len(lacking)} of 256 bytes, first {lacking[0]}, and llama.cpp needs them all"
        )


def _owners(known: dict[int, tuple[str, TokenType]], files: TokenizerFiles) -> dict[str, int]:
    """Return which number keeps each text; an added token goes before others, as it is found first."""
    owners: dict[str, int] = {}
    for number in sorted(known, key=lambda each: (each not in files.added, each)):
        owners.setdefault(known[number][0], number)
    return owners


def _type(text: str, files: TokenizerFiles, *, spaces: bool) -> TokenType:
    if spaces and text == files.model.get("unk_token"):
        return TokenType.UNKNOWN
    return TokenType.BYTE if spaces and BYTE.fullmatch(text) else TokenType.NORMAL
