"""List the tokens of a vocabulary by number as llama.cpp needs them, their merges, and those with a meaning.

Each text is there once, with a type. Tokens with a meaning begin and end a text or a turn, pad, or mark gaps in code. A
vocabulary in the manner of SentencePiece, where a space is a character of its own, is told from one of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gguf import TokenType

from slipway.texts import quoted
from slipway.validation.texts import TextKind
from slipway_gguf.vocabulary.documents import MOST_TOKENS, TokenizerFiles, unsupported_error

SPACE = "▁"
"""The character for a space in vocabularies like SentencePiece's."""
BYTE = re.compile(r"<0x[0-9A-F]{2}>")

_MOST_MERGES = 4 * MOST_TOKENS

_SPECIAL_TOKENS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
    "mask": "mask_token",
}
"""Names in GGUF (which spells one of them this way), and names in a tokenizer's settings."""
_MESSAGE_END = ("<|eom_id|>",)
_CODE_GAPS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "▁<PRE>", "<｜fim▁begin｜>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "▁<SUF>", "<｜fim▁hole｜>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "▁<MID>", "<｜fim▁end｜>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Texts of the tokens that mark a gap in code, in different models."""


@dataclass(frozen=True, slots=True)
class TokenList:
    """The tokens by number.

    Attributes:
        texts: Their texts.
        types: Their types.
    """

    texts: tuple[str, ...]
    types: tuple[TokenType, ...]


def as_it_is(text: str) -> str:
    """Return a token's text as it is."""
    return text


def list_tokens(files: TokenizerFiles, *, rows: int, spaces: bool, spell: Callable[[str], str] = as_it_is) -> TokenList:
    """List the tokens.

    Args:
        files: The tokenizer.
        rows: Number of rows of the embedding. There must be as many tokens, so numbers without one get a placeholder.
        spaces: Whether a space is written as :data:`SPACE`, and a byte without a token as ``<0xHH>``.
        spell: Returns the text in the file of a token that is no added one.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: there are more tokens than rows, or bytes without a token.
    """
    if spaces:
        _check_bytes(files)
    highest = max([*files.vocabulary.values(), *files.added])
    if highest >= rows:
        raise unsupported_error(
            f"the tokenizer has a token with the number {highest}, and the embedding has {rows} rows",
            "give the tokenizer of this model, or resize its embedding",
        )
    known = {number: (spell(text), _type(text, files, spaces=spaces)) for text, number in files.vocabulary.items()}
    for number, added in files.added.items():
        # llama.cpp looks for such a token in the original text, where a space is a space.
        text = added.content.replace(SPACE, " ") if spaces and not added.special else added.content
        is_unknown = added.content == files.model.get("unk_token") and spaces
        special = TokenType.UNKNOWN if is_unknown else TokenType.CONTROL
        known[number] = (text, special if added.special else TokenType.USER_DEFINED)
    taken = _owners(known, files)
    texts, types = [], []
    for number in range(rows):
        text, kind = known.get(number, ("", TokenType.UNUSED))
        if not text or taken[text] != number:  # llama.cpp ends the process if two tokens have the same text
            text, kind = f"[PAD{number}]", TokenType.UNUSED
            while text in taken:
                text += "_"
            taken[text] = number
        texts.append(text)
        types.append(kind)
    return TokenList(tuple(texts), tuple(types))


def _check_bytes(files: TokenizerFiles) -> None:
    """Refuse a vocabulary in which a byte has no token: llama.cpp ends the process at a character that has no token either."""
    known = files.vocabulary.keys() | {added.content for added in files.added.values()}
    lacking = [text for text in (f"<0x{byte:02X}>" for byte in range(256)) if text not in known]
    if lacking:
        raise unsupported_error(
            f"its vocabulary has no token for {len(lacking)} of 256 bytes, first {lacking[0]}, and llama.cpp needs them all"
        )


def _owners(known: dict[int, tuple[str, TokenType]], files: TokenizerFiles) -> dict[str, int]:
    """Return the number that keeps each text; prefer added tokens, because tokenizers look for them first."""
    owners: dict[str, int] = {}
    for number in sorted(known, key=lambda each: (each not in files.added, each)):
        owners.setdefault(known[number][0], number)
    return owners


def _type(text: str, files: TokenizerFiles, *, spaces: bool) -> TokenType:
    if spaces and text == files.model.get("unk_token"):
        return TokenType.UNKNOWN
    return TokenType.BYTE if spaces and BYTE.fullmatch(text) else TokenType.NORMAL


def pairs_of(files: TokenizerFiles) -> list[tuple[str, str]]:
    """Return the merges, in the order of their priority.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: an entry is no merge, or a merge gives no token.
    """
    merges = files.model.get("merges")
    if not isinstance(merges, list) or len(merges) > _MOST_MERGES:
        raise unsupported_error(f"the tokenizer has no list of at most {_MOST_MERGES} merges")
    pairs = [_pair(each) for each in merges]
    wrong = next((pair for pair in pairs if any(text not in files.vocabulary for text in (*pair, "".join(pair)))), None)
    if wrong is not None:
        raise unsupported_error(f"the merge {quoted(' '.join(wrong))} has parts, or makes a text, that are no tokens")
    return pairs


def merge_texts(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield each merge as a GGUF file holds it; llama.cpp splits it at the first space behind the first character."""
    for left, right in pairs:
        if " " in left[1:] or " " in right:
            raise unsupported_error(
                f"the merge of {quoted(left)} and {quoted(right)} has a space, which a GGUF file cannot hold"
            )
        yield f"{left} {right}"


def scores_of(pairs: Iterable[tuple[str, str]], tokens: TokenList) -> tuple[float, ...]:
    """Return a score per token: llama.cpp merges the two neighbours whose joint token has the highest score.

    A token's score follows from the first merge that gives it. Tokens that no merge gives come last.
    """
    order: dict[str, int] = {}
    for left, right in pairs:
        order.setdefault(left + right, len(order))
    return tuple(-float(order.get(text, len(order))) for text in tokens.texts)


def _pair(merge: Any) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    match parts:
        case [str(left), str(right)] if left and right:
            return left, right
    raise unsupported_error(f"the tokenizer has {quoted(merge)} among its merges")


@dataclass(frozen=True, slots=True)
class Spaces:
    """How spaces are written.

    Attributes:
        prefix: Whether a space is put before a text.
        differs: Kinds of text that llama.cpp splits differently.
    """

    prefix: bool
    differs: tuple[TextKind, ...] = ()


def spaces_of(tokenizer: Mapping[str, Any]) -> Spaces | None:
    """Return how a tokenizer writes spaces as :data:`SPACE`; None for a byte-level tokenizer.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: it changes text in a way that llama.cpp does not.
    """
    pre = tokenizer.get("pre_tokenizer")
    steps = steps_of(tokenizer.get("normalizer"), "normalizers")
    meta = pre if isinstance(pre, dict) and pre.get("type") == "Metaspace" else None
    replaced = any(step.get("type") == "Replace" and step.get("content") == SPACE for step in steps)
    if meta is None and not replaced:
        return None
    prepended = [step.get("prepend") for step in steps if step.get("type") == "Prepend"]
    if prepended not in ([], [SPACE]):
        raise unsupported_error(f"it writes {quoted(prepended)} before each text, and llama.cpp only a space")
    other = next((step for step in steps if step.get("type") != "Prepend" and not _replaces_spaces(step)), None)
    if other is not None:
        raise unsupported_error(f"it changes text before it splits ({quoted(other)}), which llama.cpp does not")
    if meta is None:
        _check_inert(pre)
        return Spaces(bool(prepended))
    if prepended:
        raise unsupported_error("it puts a space before each text twice (Prepend and Metaspace), and llama.cpp once")
    if meta.get("replacement", SPACE) != SPACE:
        raise unsupported_error(f"it writes a space as {quoted(meta.get('replacement'))}, and llama.cpp as {SPACE}")
    if meta.get("split", True):
        raise unsupported_error(
            "it splits text at spaces (Metaspace with split), which llama.cpp does not do with such vocabularies"
        )
    scheme = meta.get("prepend_scheme", "always" if meta.get("add_prefix_space", True) else "never")
    # This step adds no space before a text that begins with one. llama.cpp always does, and behind special tokens too.
    behind = (TextKind.SPECIAL,) if scheme == "first" else ()
    return Spaces(scheme != "never", (TextKind.LEADING, TextKind.SPECIAL_SPACES, *behind) if scheme != "never" else ())


def _replaces_spaces(step: Mapping[str, Any]) -> bool:
    """Return whether a step of the normalizer only writes spaces as :data:`SPACE`."""
    return (step.get("type"), step.get("pattern"), step.get("content")) == ("Replace", {"String": " "}, SPACE)


def _check_inert(pre: Any) -> None:
    """Refuse a pre-tokenizer that splits. Splitting at spaces is allowed: it does nothing, because no space is left."""
    pattern = pre.get("pattern") if isinstance(pre, dict) else None
    if pre is not None and not (isinstance(pattern, dict) and pattern == {"String": " "}):
        raise unsupported_error(f"it splits text by {quoted(pre)}, which llama.cpp does not do with such vocabularies")


def steps_of(normalizer: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a part of a tokenizer, which are listed under ``key`` if it has several."""
    if isinstance(normalizer, dict) and normalizer.get("type") == "Sequence":
        listed = normalizer.get(key)
        return [each for each in (listed if isinstance(listed, list) else []) if isinstance(each, dict)]
    return [normalizer] if isinstance(normalizer, dict) else []


def special_token_ids(files: TokenizerFiles, *, rows: int, template: str) -> dict[str, int]:
    """Return the numbers of the tokens with a meaning, by GGUF's name of the meaning.

    Chat models end a turn with another token than a text, and only ``generation_config.json`` names both. llama.cpp ends a text at ``eos``,
    ``eot`` and ``eom``; without an ``eos`` it uses token 11.

    Args:
        files: The tokenizer, and the model's settings.
        rows: Number of tokens.
        template: The chat template; empty without one.
    """
    numbers = {name: files.number_of_setting(setting) for name, setting in _SPECIAL_TOKENS.items()}
    ends = end_token_ids(files, rows=rows)
    if numbers["eos"] is None and ends:
        numbers["eos"] = ends[0]
    for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if numbers[name] is None:
            numbers[name] = next(iter(_ids_in_settings(files, key, rows=rows)), None)
    numbers["eot"] = _turn_end(files, ends, numbers["eos"], template=template)
    others = [number for number in ends if number not in (numbers["eos"], numbers["eot"])]
    named = [number for text in _MESSAGE_END if (number := files.number_of(text)) is not None]
    numbers["eom"] = next(iter([*named, *others]), None)
    for name, texts in _CODE_GAPS.items():
        numbers[name] = next((number for text in texts if (number := files.number_of(text)) is not None), None)
    return {name: number for name, number in numbers.items() if number is not None}


def end_token_ids(files: TokenizerFiles, *, rows: int) -> list[int]:
    """Return the tokens that end a generated text."""
    return _ids_in_settings(files, "eos_token_id", rows=rows)


def _ids_in_settings(files: TokenizerFiles, key: str, *, rows: int) -> list[int]:
    """Return the numbers under a key of the generation settings, or else of the model's settings."""
    for settings in (files.generation, files.config):
        value = settings.get(key)
        listed = value if isinstance(value, list) else [value]
        numbers = [each for each in listed if type(each) is int and 0 <= each < rows]
        if numbers:
            return list(dict.fromkeys(numbers))
    return []


def _turn_end(files: TokenizerFiles, ends: list[int], eos: int | None, *, template: str) -> int | None:
    """Return the end-of-text token that the chat template emits; prefer ``eos``.

    Ignore the end-of-message token: the model continues behind it when it has the result of a tool.
    """
    if not template:
        return None
    texts = {number: text for text, number in files.vocabulary.items() if number in ends or number == eos}
    texts |= {number: added.content for number, added in files.added.items() if number in ends or number == eos}
    candidates = [number for number in (eos, *ends) if number in texts and texts[number] not in _MESSAGE_END]
    return next((number for number in candidates if texts[number] in template), None)
