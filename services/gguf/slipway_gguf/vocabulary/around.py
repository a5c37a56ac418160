"""Find the tokens that a tokenizer puts around a text, and between the two texts of a pair, for models that read whole texts."""

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

    def numbers(self, known: Mapping[str, int]) -> dict[str, int]:
        """Return the numbers of tokens with a meaning: these, and others by GGUF's names of the meaning."""
        own = {"bos": self.begin, "eos": self.end, "seperator": self.end}
        return {**known, **{name: number for name, number in own.items() if number is not None}}


def around_of(files: TokenizerFiles) -> Around:
    """Return the tokens around a text.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: they are others than llama.cpp puts there.
    """
    single, pair = _pieces(files.tokenizer.get("post_processor"))
    if single.count(_TEXT) != 1:
        return Around()
    place = single.index(_TEXT)
    before, behind = single[:place], single[place + 1 :]
    if max(len(before), len(behind)) > 1:
        raise unsupported_error(
            f"it puts {quoted(before)} before each text and {quoted(behind)} behind it, and llama.cpp at most one token at either end"
        )
    begin, end = (_number(files, each) for each in (before, behind))
    return Around(begin, end, _between(pair) == [*behind, *behind] if behind else False)


def _between(pair: list[str]) -> list[str]:
    """Return the tokens between the two texts of a pair."""
    places = [place for place, piece in enumerate(pair) if piece == _TEXT]
    return pair[places[0] + 1 : places[1]] if len(places) == 2 else []


def _number(files: TokenizerFiles, pieces: list[str]) -> int | None:
    if not pieces:
        return None
    number = files.number_of(pieces[0])
    if number is None:
        raise unsupported_error(f"it puts {quoted(pieces[0])} around each text, which is none of its tokens")
    return number


def _pieces(processor: Any, depth: int = 0) -> tuple[list[str], list[str]]:
    """Return the tokens of a text, and of a pair, in order; an empty name stands for a text."""
    if not isinstance(processor, dict) or depth > _NESTED:
        return [_TEXT], []
    match processor.get("type"):
        case "Sequence":
            steps = processor.get("processors")
            lists = [_pieces(step, depth + 1) for step in (steps if isinstance(steps, list) else [])]
            return next((each for each in lists if len(each[0]) > 1), ([_TEXT], []))
        case "TemplateProcessing":
            return _listed(processor.get("single")), _listed(processor.get("pair"))
        case "BertProcessing" | "RobertaProcessing" as kind:
            begin, end = (_first(processor.get(name)) for name in ("cls", "sep"))
            more = [end] if kind == "RobertaProcessing" else []
            return [begin, _TEXT, end], [begin, _TEXT, end, *more, _TEXT, end]
    return [_TEXT], []


def _first(named: Any) -> str:
    """Return the text of a token that is stored with its number."""
    return str(named[0]) if isinstance(named, list) and named else _TEXT


def _listed(parts: Any) -> list[str]:
    pieces = (
        [next(iter(part.items())) for part in parts if isinstance(part, dict) and part]
        if isinstance(parts, list)
        else []
    )
    return [
        str(value.get("id")) if kind == "SpecialToken" and isinstance(value, dict) else _TEXT for kind, value in pieces
    ]
