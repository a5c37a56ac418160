"""Read JSON from a user or peer with limits: bytes, values, nesting, digits of a number.

A small file can take much memory (an empty list has two bytes in a file and 56 in memory), block for ever (a pipe), or contain
values that break later code (infinity, half of a surrogate pair, a number of 5,000 digits). All of these end here in ``OSError`` or
``ValueError`` with a one-line message.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from slipway.files.regular_file import read_regular

LARGEST = 4 << 20
"""Default limit for the bytes of a document."""
LARGEST_LIST = 64 << 20
"""Limit for a document with an entry per tensor, token or logged training step."""
MOST_NESTED = 64
"""Deepest nesting of lists and objects."""
_BYTES_PER_VALUE = 16
_MOST_DIGITS = 40
"""Enough for the 10³⁰ that tokenizers write for "no limit"."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(path: Path, *, largest: int = LARGEST, lenient: bool = False, any_text: bool = False) -> Any:
    """Read a JSON file.

    Args:
        path: The file.
        largest: Most bytes it may have.
        lenient: As :func:`parse_json`.
        any_text: As :func:`parse_json`.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger.
        ValueError: As :func:`parse_json`.
    """
    data = read_regular(path, largest=largest)
    return parse_json(data, most_values=largest // _BYTES_PER_VALUE, lenient=lenient, any_text=any_text)


def read_json_object(
    path: Path, *, largest: int = LARGEST, lenient: bool = False, any_text: bool = False
) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Arguments and errors are those of :func:`read_json`; anything else than an object is a ``ValueError`` too.
    """
    document = read_json(path, largest=largest, lenient=lenient, any_text=any_text)
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - the file is at fault, not the caller
    return document


def parse_json(
    data: bytes, *, most_values: int = LARGEST // _BYTES_PER_VALUE, lenient: bool = False, any_text: bool = False
) -> Any:
    """Parse a JSON document.

    Args:
        data: UTF-8.
        most_values: Most values in it.
        lenient: Accept NaN, infinity, and the last of equal names in an object, as Python does. Trainers and transformers write
            such files.
        any_text: Accept halves of surrogate pairs, which Python writes for paths that are not UTF-8. Such text can be neither shown
            nor sent, so the caller must check the other parts with :func:`check_texts`.

    Raises:
        ValueError: It is not JSON, or beyond a limit; the message is one line.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > most_values:
        raise ValueError(f"it holds more than {most_values} values")
    strict = not lenient
    try:
        document = json.loads(
            data.decode("utf-8"),
            parse_int=_parse_integer,
            parse_float=_parse_finite if strict else None,
            parse_constant=_refuse_number if strict else None,
            object_pairs_hook=_check_unique if strict else None,
        )
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_NESTED} deep") from None
    _check_values(document, texts=not any_text and _SURROGATE.search(data) is not None)
    return document


def check_texts(document: Any) -> None:
    """Refuse halves of surrogate pairs in a document.

    Raises:
        ValueError: There is one.
    """
    _check_values(document, texts=True)


def _parse_integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"it holds a whole number of {len(text)} digits")
    return int(text)


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        return _refuse_number(text)
    return value


def _refuse_number(text: str) -> float:
    raise ValueError(f"it holds {text[:_MOST_DIGITS]}, which is not a finite number")


def _check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"it names {twice[:100]!r} twice")
    return result


def _check_values(document: Any, *, texts: bool) -> None:
    """Refuse deep nesting and, if ``texts`` is true, halves of surrogate pairs."""
    level: list[Any] = [[document]]
    for _ in range(MOST_NESTED + 1):
        below: list[Any] = []
        for part in level:
            values = part.values() if isinstance(part, dict) else part
            if texts:
                for text in (*part, *values):
                    if isinstance(text, str):
                        _check_text(text)
            below += [value for value in values if isinstance(value, dict | list)]
        if not below:
            return
        level = below
    raise ValueError(f"it is nested more than {MOST_NESTED} deep")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"it holds half of a surrogate pair, in {text[:100]!r}") from None


def read_object_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if the file is missing or holds anything else."""
    try:
        return read_json_object(path, largest=LARGEST_LIST, lenient=True)
    except (OSError, ValueError):
        return {}
