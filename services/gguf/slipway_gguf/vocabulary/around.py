"""Find the tokens that a tokenizer puts around a text, and between the two texts of a pair of models that read whole texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.texts import quoted
from slipway_gguf.vocabulary.documents import TokenizerFiles, unsupported_error

_NESTED = 8
_TEXT = ""
"""Stands for a text among the tokens around it."""


@dataclass(frozen=True, slots=True)
class Processed:
    """What a tokenizer makes of texts: the names of tokens in order, and an empty name for a text.

    Attributes:
        single: Of one text.
        pair: Of two; empty if it does not say.
    """

    single: tuple[str, ...]
    pair: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Around:
    """Tokens around a text.

    Attributes:
        begin: The token before each text; None for none.
        end: The token behind it.
        doubled: Whether two tokens are between the texts of a pair: the end of the first, and one more.
    """

    begin: int | None = None
    end: int | None = None
    doubled: bool = False

    def numbers(self, known: Mapping[str, int], *, pairs: bool = True) -> dict[str, int]:
        """Return the numbers of tokens with a meaning: these, and others by GGUF's names of the meaning.

        Args:
            known: The others.
            pairs: Whether the token behind a text is the one between two texts too.
        """
        own = {"bos": self.begin, "eos": self.end, **({"seperator": self.end} if pairs else {})}
        return {**known, **{name: number for name, number in own.items() if number is not None}}


def around_of(files: TokenizerFiles) -> Around:
    """Return the tokens around a text.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: they are others than llama.cpp puts there.
    """
    processed = read_processor(files.tokenizer.get("post_processor"))
    if processed is None:
        return Around()
    before, behind = _ends(processed)
    if max(len(before), len(behind)) > 1:
        raise unsupported_error(_too_many(before, behind))
    begin, end = (_number(files, each) for each in (before, behind))
    return Around(begin, end, _between(processed.pair) == [*behind, *behind] if behind else False)


def around_decoded(files: TokenizerFiles, known: Mapping[str, int]) -> tuple[Around, str]:
    """Return the tokens around a text of a model that predicts tokens, and why one is not there that its tokenizer puts there.

    llama.cpp puts the token before a text that chat templates know as ``bos_token``, and behind it the one that ends a generated text.
    So other tokens have no place, unless the tokenizer names no ``bos_token``, or nothing names a token that ends a text.

    Args:
        files: The tokenizer.
        known: Numbers of tokens with a meaning, by GGUF's name of the meaning.
    """
    processed = read_processor(files.tokenizer.get("post_processor"))
    if processed is None:
        begin, end = (known.get(name) if files.settings.get(f"add_{name}_token") else None for name in ("bos", "eos"))
        return Around(begin, end), ""
    before, behind = _ends(processed)
    # config.json often has the default of the class as ``bos_token_id``, and nothing but the begin of a text depends on it.
    named = {"bos": files.number_of_setting("bos_token"), "eos": known.get("eos")}
    (begin, no_begin), (end, no_end) = (
        _only(files, pieces, named[name], _too_many(before, behind))
        for name, pieces in (("bos", before), ("eos", behind))
    )
    return Around(begin, end), no_begin or no_end


def _only(files: TokenizerFiles, pieces: list[str], meaning: int | None, too_many: str) -> tuple[int | None, str]:
    """Return the token at one end of a text, if llama.cpp can put it there, and else why not."""
    if len(pieces) > 1:
        return None, too_many
    number = files.number_of(pieces[0]) if pieces else None
    if pieces and number is None:
        return None, _unknown(pieces[0])
    if number is None or meaning in (None, number):
        return number, ""
    return None, f"it puts {quoted(pieces[0])} around each text, and llama.cpp only its tokens that begin and end one"


def _ends(processed: Processed) -> tuple[list[str], list[str]]:
    """Return the tokens before a text and those behind it."""
    if processed.single.count(_TEXT) != 1:
        return [], []
    place = processed.single.index(_TEXT)
    return list(processed.single[:place]), list(processed.single[place + 1 :])


def _too_many(before: list[str], behind: list[str]) -> str:
    return f"it puts {quoted(before)} before each text and {quoted(behind)} behind it, and llama.cpp at most one token at either end"


def _unknown(piece: str) -> str:
    return f"it puts {quoted(piece)} around each text, which is none of its tokens"


def _between(pair: tuple[str, ...]) -> list[str]:
    """Return the tokens between the two texts of a pair."""
    places = [place for place, piece in enumerate(pair) if piece == _TEXT]
    return list(pair[places[0] + 1 : places[1]]) if len(places) == 2 else []


def _number(files: TokenizerFiles, pieces: list[str]) -> int | None:
    if not pieces:
        return None
    number = files.number_of(pieces[0])
    if number is None:
        raise unsupported_error(_unknown(pieces[0]))
    return number


def read_processor(processor: Any, depth: int = 0) -> Processed | None:
    """Return what a tokenizer makes of a text and of a pair, as the part ``post_processor`` of ``tokenizer.json`` says; None if it says nothing.

    Of several steps the first counts that puts a token around a text.
    """
    if not isinstance(processor, dict) or depth > _NESTED:
        return None
    match processor.get("type"):
        case "Sequence":
            steps = processor.get("processors")
            read = [read_processor(step, depth + 1) for step in (steps if isinstance(steps, list) else [])]
            stated = [each for each in read if each is not None]
            return next((each for each in stated if len(each.single) > 1), stated[0] if stated else None)
        case "TemplateProcessing" if isinstance(processor.get("single"), list):
            return Processed(_listed(processor["single"]), _listed(processor.get("pair")))
        case "BertProcessing" | "RobertaProcessing" as kind:
            begin, end = (_first(processor.get(name)) for name in ("cls", "sep"))
            between = (end, end) if kind == "RobertaProcessing" else (end,)
            return Processed((begin, _TEXT, end), (begin, _TEXT, *between, _TEXT, end))
    return None


def _first(named: Any) -> str:
    """Return the text of a token that is stored with its number."""
    return str(named[0]) if isinstance(named, list) and named else _TEXT


def _listed(parts: Any) -> tuple[str, ...]:
    listed = parts if isinstance(parts, list) else []
    pieces = [next(iter(part.items())) for part in listed if isinstance(part, dict) and part]
    return tuple(
        str(value.get("id")) if kind == "SpecialToken" and isinstance(value, dict) else _TEXT for kind, value in pieces
    )
