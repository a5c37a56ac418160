"""Read Mistral's ``tekken.json``, which holds byte strings in the order of their merges, and check it before it is used.

Some of Mistral's folders have this file and no ``tokenizer.json``. Its layout is that of mistral-common 1.13 (``tokens/tokenizers/tekken.py``):
the numbers of the special tokens come first, and those without a name of their own are called ``<SPECIAL_n>``; byte strings follow in their order,
and the list goes on beyond the vocabulary, which ``default_vocab_size`` ends.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.errors import CheckpointValidationError
from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.files.paths import file_in
from slipway.texts import quoted

TEKKEN = "tekken.json"
TOKENIZER = "tokenizer.json"
_SENTENCEPIECE = "tokenizer.model"

_MOST_TOKENS = 1 << 21
_MOST_SPECIAL = 1 << 16
_LONGEST_TOKEN = 256
"""Most bytes of a token; Mistral's longest has 78. Its merges are found in a time that grows with the square of it."""
_LONGEST_SPECIAL = 200
_LONGEST_PATTERN = 2000
_BYTES = 256
_FILLER = "<SPECIAL_{}>"
_WITHOUT_LIST = ("v1", "v2", "v3", "v7")
"""Versions whose files may leave their special tokens out."""
_FIRST_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
    "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""The special tokens of a file that lists none; source: ``Tekkenizer.DEPRECATED_SPECIAL_TOKENS`` of mistral-common."""


@dataclass(frozen=True, slots=True)
class Tekken:
    """The content of a ``tekken.json``, checked.

    Attributes:
        version: The publisher's version of the tokenizer, such as ``v11``.
        pattern: Regular expression of the parts that are merged each on its own.
        special: Special tokens; their places are their numbers.
        tokens: Byte strings, in the order of their merges; their numbers follow those of the special tokens.
    """

    version: str
    pattern: str
    special: tuple[str, ...]
    tokens: tuple[bytes, ...]


def lacks_tokenizer(folder: Path) -> bool:
    """Return whether a folder has its tokenizer as ``tekken.json`` alone.

    Raises:
        ArtifactError: As :func:`slipway.files.paths.file_in`.
    """
    others = any((folder / name).is_file() for name in (TOKENIZER, _SENTENCEPIECE))
    return not others and file_in(folder, TEKKEN) is not None


def tekken_error(path: Path, what: str) -> Exception:
    """Return the error for a file that is damaged, or is none of Mistral's."""
    return CheckpointValidationError(
        f"{path.name} {what}, so no tokenizer can be made from it",
        reason="TOKENIZER_INVALID",
        remedy=f"download {path.name} again, or put a {TOKENIZER} beside it that was saved with transformers",
        about={"file": path},
    )


def read_tekken(path: Path) -> Tekken:
    """Read the file within limits.

    Raises:
        CheckpointValidationError: ``TOKENIZER_INVALID``.
    """
    try:
        document = read_json_object(path, largest=LARGEST_LIST, lenient=True)
    except (OSError, ValueError) as error:
        raise tekken_error(path, f"cannot be read ({error})") from error
    config = document.get("config")
    if not isinstance(config, dict):
        raise tekken_error(path, "has no settings (config)")
    pattern, version = config.get("pattern"), config.get("version")
    if not isinstance(pattern, str) or not 0 < len(pattern) <= _LONGEST_PATTERN:
        raise tekken_error(path, f"has {quoted(pattern)} as its pattern, which is no text of at most {_LONGEST_PATTERN} characters")  # fmt: skip
    if not isinstance(version, str):
        raise tekken_error(path, f"has {quoted(version)} as its version")
    count = _number(path, config, "default_num_special_tokens", least=1, most=_MOST_SPECIAL)
    size = _number(path, config, "default_vocab_size", least=count + _BYTES, most=_MOST_TOKENS)
    special = _read_special(path, document.get("special_tokens"), count, version)
    tokens = _read_tokens(path, document.get("vocab"), size - count)
    if "num_vocab_tokens" in config:
        _number(path, config, "num_vocab_tokens", least=len(tokens), most=_MOST_TOKENS)
    return Tekken(version, pattern, special, tokens)


def _number(path: Path, config: Mapping[str, Any], key: str, *, least: int, most: int) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise tekken_error(path, f"has {quoted(value)} as its {key}, which is no number from {least} to {most}")
    return value


def _read_special(path: Path, listed: Any, count: int, version: str) -> tuple[str, ...]:
    """Return ``count`` special tokens in the order of their numbers."""
    if listed is None and version in _WITHOUT_LIST:
        named = list(_FIRST_SPECIAL)
    elif isinstance(listed, list) and all(isinstance(each, dict) for each in listed):
        named = [_special_text(path, each, place) for place, each in enumerate(listed)]
    else:
        raise tekken_error(path, f"lists no special tokens, and files of version {quoted(version)} must")
    if len(named) > count:
        raise tekken_error(path, f"has {len(named)} special tokens, and says that there are {count}")
    special = (*named, *(_FILLER.format(number) for number in range(len(named), count)))
    if len(set(special)) < count:
        raise tekken_error(path, f"names the special token {quoted(special[_first_twice(special)])} twice")
    return special


def _first_twice(values: Sequence[str | bytes]) -> int:
    """Return the place of the first value that stands before it too; one does."""
    seen: set[str | bytes] = set()
    for place, value in enumerate(values):
        if value in seen:
            return place
        seen.add(value)
    return len(values)


def _special_text(path: Path, listed: Mapping[str, Any], place: int) -> str:
    rank, text = listed.get("rank"), listed.get("token_str")
    if rank != place or isinstance(rank, bool):
        raise tekken_error(path, f"has {quoted(rank)} as the number of its special token {place}")
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_SPECIAL or "\0" in text:
        raise tekken_error(path, f"has {quoted(text)} as its special token {place}")
    return text


def _read_tokens(path: Path, listed: Any, count: int) -> tuple[bytes, ...]:
    """Return the first ``count`` byte strings; what follows is in no vocabulary, so it is not looked at."""
    if not isinstance(listed, list) or len(listed) < count:
        has = len(listed) if isinstance(listed, list) else "no list of"
        raise tekken_error(path, f"has {has} tokens, and its sizes say {count}")
    tokens = tuple(_token_bytes(path, each, rank) for rank, each in enumerate(listed[:count]))
    if len(set(tokens)) < count:
        raise tekken_error(path, f"has the bytes of its token {_first_twice(tokens)} twice")
    return tokens


def _token_bytes(path: Path, listed: Any, rank: int) -> bytes:
    named, text = (listed.get(key) if isinstance(listed, dict) else None for key in ("rank", "token_bytes"))
    if named != rank or isinstance(named, bool):
        raise tekken_error(path, f"has {quoted(named)} as the rank of its token {rank}; ranks follow each other from 0")
    try:
        token = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        token = b""
    if not 0 < len(token) <= _LONGEST_TOKEN:
        raise tekken_error(path, f"has {quoted(text)} as token {rank}, which is no base64 of 1 to {_LONGEST_TOKEN} bytes")  # fmt: skip
    if rank < _BYTES and token != bytes([rank]):
        raise tekken_error(path, f"has {quoted(text)} as token {rank}: the first {_BYTES} must be the single bytes")
    return token
