"""Write a tokenizer of byte strings in the order of their merges as ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipway.files.json_documents import read_json_object
from slipway.machine.bounded.process import BoundedProcess, Bounds, RefusedWorkError, UnboundedWorkError
from slipway.model.model_files import CHAT_TEMPLATES, TOKENIZER_SETTINGS, has_chat_template
from slipway.model.tokens.tekken import TEKKEN, TOKENIZER, Tekken, lacks_tokenizer, read_tekken, tekken_error

_MARKS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
"""Names of special tokens by what transformers calls them; source: mistral-common, ``Tekkenizer.bos_id`` and its like."""
_MOST_MERGES = 1 << 20
"""Mistral's 130,072 tokens have 269,443."""
_TRIAL = "slipway.model.tokens.byte_level:trial"
_BOUNDS = Bounds(seconds=20.0)
_LONG = 20_000
_PROBES = ("a" * _LONG, "A" * _LONG, " " * _LONG, "\n" * _LONG, "-" * _LONG, "aA " * _LONG, "一" * _LONG)
"""Texts at which an expression that tries every way to match takes without end."""


def complete_tokenizer(folder: Path, *, source: Path | None = None) -> Tekken | None:
    """Write into a folder that has ``tekken.json`` alone what transformers and every runtime read; return what was read, or None.

    A chat template that lies in ``chat_template.json`` is written as ``chat_template.jinja``, where tokenizers look for it. A folder without one
    gets none: which of Mistral's ways to write a conversation a model was trained with, its tokenizer does not say.

    Args:
        folder: The folder.
        source: The folder that its files were copied from, which errors name.

    Raises:
        CheckpointValidationError: ``TOKENIZER_INVALID``.
    """
    if not lacks_tokenizer(folder):
        return None
    path = (source or folder) / TEKKEN
    tekken = read_tekken(path)
    _try_pattern(path, tekken.pattern)
    document = _document(path, tekken)
    (folder / TOKENIZER).write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    settings = _settings(folder, tekken)
    (folder / TOKENIZER_SETTINGS).write_text(
        json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
    )
    _write_template(folder)
    return tekken


def _settings(folder: Path, tekken: Tekken) -> dict[str, Any]:
    """Return the tokenizer's settings: those that are there, with the special tokens, and with a class that reads ``tokenizer.json``."""
    try:
        own = read_json_object(folder / TOKENIZER_SETTINGS, lenient=True)
    except FileNotFoundError:
        own = {}
    except (OSError, ValueError) as error:
        raise tekken_error(folder / TOKENIZER_SETTINGS, f"cannot be read ({error})") from error
    marks = {name: text for name, text in _MARKS.items() if text in tekken.special}
    return {"clean_up_tokenization_spaces": False, **marks, **own, "tokenizer_class": "PreTrainedTokenizerFast"}


def _write_template(folder: Path) -> None:
    jinja, packed = (folder / name for name in CHAT_TEMPLATES)
    if not packed.is_file() or has_chat_template(folder):
        return
    try:
        template = read_json_object(packed, lenient=True).get("chat_template")
    except (OSError, ValueError) as error:
        raise tekken_error(packed, f"cannot be read ({error})") from error
    if isinstance(template, str):
        jinja.write_text(template, encoding="utf-8")


def _document(path: Path, tekken: Tekken) -> dict[str, Any]:
    """Return ``tokenizer.json``."""
    first = len(tekken.special)
    texts = [token.decode("latin-1").translate(_CHARACTERS) for token in tekken.tokens]
    special = {text: number for number, text in enumerate(tekken.special)}
    # A text never holds a special token's own text where tokens are merged, because it is split there before.
    ranks = {token: rank for rank, token in enumerate(tekken.tokens) if texts[rank] not in special}
    vocabulary = special | {texts[rank]: first + rank for rank in ranks.values()}
    merges = [(texts[left], texts[right]) for left, right in _merges(path, ranks)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(number, text) for text, number in special.items()],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": tekken.pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": _post_processor(special),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A part that is a token becomes it whole, as in tiktoken.
            "ignore_merges": True,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _added(number: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": True}


def _post_processor(special: Mapping[str, int]) -> dict[str, Any]:
    """Return the step that begins each text with ``<s>``, as Mistral's models were trained, where there is such a token."""
    begin = _MARKS["bos_token"]
    if begin not in special:
        return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    pair = [
        step
        for kind, name in enumerate("AB")
        for step in ({"SpecialToken": {"id": begin, "type_id": kind}}, {"Sequence": {"id": name, "type_id": kind}})
    ]
    return {
        "type": "TemplateProcessing",
        "single": pair[:2],
        "pair": pair,
        "special_tokens": {begin: {"id": begin, "ids": [special[begin]], "tokens": [begin]}},
    }


def _merges(path: Path, ranks: Mapping[bytes, int]) -> list[tuple[int, int]]:
    """Return the pairs of tokens that make another, in the order in which tiktoken merges them: by the number of what they make.

    tiktoken merges any two neighbours whose joined bytes are a token, so each token has every pair that makes it, and not one alone.

    Raises:
        CheckpointValidationError: ``TOKENIZER_INVALID``: there are more than any tokenizer of this size has.
    """
    pairs: list[tuple[int, int]] = []
    for token in ranks:  # in the order of their numbers
        halves = ((ranks.get(token[:cut]), ranks.get(token[cut:])) for cut in range(1, len(token)))
        pairs += sorted((left, right) for left, right in halves if left is not None and right is not None)
        if len(pairs) > _MOST_MERGES:
            raise tekken_error(path, f"has tokens that more than {_MOST_MERGES:,} pairs of others make")
    return pairs


def _try_pattern(path: Path, pattern: str) -> None:
    """Split difficult texts by the expression, in a process with limits.

    Raises:
        CheckpointValidationError: ``TOKENIZER_INVALID``: it is no expression, or takes too long.
    """
    try:
        with BoundedProcess(_TRIAL, _BOUNDS, imports=("tokenizers",)) as process:
            for _ in process.items(pattern):
                pass
    except UnboundedWorkError as error:
        raise tekken_error(path, f"has a pattern that is not used: to split a text by it {error}") from error
    except RefusedWorkError as error:
        raise tekken_error(path, f"has a pattern that is no regular expression ({error})") from error


def trial(pattern: str) -> Iterator[int]:
    """Split the probes by an expression, in the process with limits; yield the number of parts of each."""
    from tokenizers import Regex, pre_tokenizers

    splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    for text in _PROBES:
        yield len(splitter.pre_tokenize_str(text))


def _characters() -> dict[int, int]:
    """Return the character that stands for each byte: itself where it is a visible one of Latin-1, otherwise one from U+0100 on.

    Source: GPT-2's ``bytes_to_unicode``, which every byte-level tokenizer uses.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: 0x100 + place for place, byte in enumerate(others)}


_CHARACTERS = _characters()
