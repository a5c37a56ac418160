"""Find the tokens with a meaning: begin and end of a text or turn, padding, gaps in code; and whether a text gets its begin and end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway_gguf.vocabulary.documents import TokenizerFiles

_NAMED = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
    "mask": "mask_token",
}
"""Names in GGUF (which spells one of them this way), and names in a tokenizer's settings."""
_MESSAGE_END = ("<|eom_id|>",)
_CODE = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "▁<PRE>", "<｜fim▁begin｜>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "▁<SUF>", "<｜fim▁hole｜>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "▁<MID>", "<｜fim▁end｜>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Texts of the tokens that mark a gap in code, in different models."""


def numbers_of(files: TokenizerFiles, *, rows: int, template: str) -> dict[str, int]:
    """Return the numbers of the tokens with a meaning, by GGUF's name of the meaning.

    Chat models end a turn with another token than a text, and only ``generation_config.json`` names both. llama.cpp ends a text at ``eos``,
    ``eot`` and ``eom``; without an ``eos`` it uses token 11.

    Args:
        files: The tokenizer, and the model's settings.
        rows: Number of tokens.
        template: The chat template; empty without one.
    """
    numbers = {name: files.number_of_setting(setting) for name, setting in _NAMED.items()}
    ends = ends_of(files, rows=rows)
    if numbers["eos"] is None and ends:
        numbers["eos"] = ends[0]
    for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if numbers[name] is None:
            numbers[name] = next(iter(_numbers(files, key, rows=rows)), None)
    numbers["eot"] = _turn_end(files, ends, numbers["eos"], template=template)
    others = [number for number in ends if number not in (numbers["eos"], numbers["eot"])]
    named = [number for text in _MESSAGE_END if (number := files.number_of(text)) is not None]
    numbers["eom"] = next(iter([*named, *others]), None)
    for name, texts in _CODE.items():
        numbers[name] = next((number for text in texts if (number := files.number_of(text)) is not None), None)
    return {name: number for name, number in numbers.items() if number is not None}


def adds_begin_and_end(files: TokenizerFiles, numbers: Mapping[str, int]) -> tuple[bool, bool]:
    """Return whether the tokenizer adds the begin-of-text token before each text, and the end-of-text token behind it."""
    pieces = _template_pieces(files.tokenizer.get("post_processor"))
    if pieces is None:
        begin, end = (bool(files.settings.get(f"add_{name}_token")) for name in ("bos", "eos"))
    else:
        begin, end = (
            len(pieces) > 1 and files.number_of(pieces[place]) == numbers.get(name, -1)
            for place, name in ((0, "bos"), (-1, "eos"))
        )
    return begin and "bos" in numbers, end and "eos" in numbers


def _template_pieces(processor: Any) -> list[str] | None:
    """Return the tokens around a text in order, with an empty name for the text; None if no template is set."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence":
        steps = processor.get("processors")
        lists = [_template_pieces(step) for step in (steps if isinstance(steps, list) else [])]
        return next((each for each in lists if each is not None), None)
    if processor.get("type") != "TemplateProcessing" or not isinstance(processor.get("single"), list):
        return None
    parts = [next(iter(part.items())) for part in processor["single"] if isinstance(part, dict) and part]
    return [str(value.get("id")) if kind == "SpecialToken" and isinstance(value, dict) else "" for kind, value in parts]


def ends_of(files: TokenizerFiles, *, rows: int) -> list[int]:
    """Return the tokens that end a generated text."""
    return _numbers(files, "eos_token_id", rows=rows)


def _numbers(files: TokenizerFiles, key: str, *, rows: int) -> list[int]:
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
