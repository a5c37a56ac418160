"""Read a tokenizer's files and a model's chat templates with limits, and check their structure before they are used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.errors import GGUFExportError
from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.files.regular_file import read_regular
from slipway.model.model_files import CHAT_TEMPLATE_FOLDER, CHAT_TEMPLATES, CONFIG, GENERATION_CONFIG
from slipway.texts import quoted

MOST_TOKENS = 1 << 21
MOST_TOKEN_BYTES = 1 << 16
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"

BYTES_OR_SPACES, WORD_PIECES, UNIGRAMS = "BPE", "WordPiece", "Unigram"
"""Kinds of models of tokens that llama.cpp has code for, as ``tokenizer.json`` names them."""

DEFAULT = "default"
_LARGEST = 1 << 20
_MOST = 32
_NAME = re.compile(r"[a-z0-9_]{1,64}")


def unsupported_error(
    message: str, remedy: str = "use another format for this model, or another tokenizer"
) -> GGUFExportError:
    """Return the error for a tokenizer that a GGUF file cannot describe to llama.cpp."""
    return GGUFExportError(message, reason="GGUF_TOKENIZER_UNSUPPORTED", remedy=remedy)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that the tokenizer looks for in the text before it splits.

    Attributes:
        id: Its number.
        content: Its text.
        special: Whether it is a mark, such as the end of a turn, and not text.
        strips: Whether it includes spaces beside it, or matches only a whole word; llama.cpp has no such tokens.
    """

    id: int
    content: str
    special: bool
    strips: bool


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The content of a tokenizer's files.

    Attributes:
        folder: The model's folder.
        tokenizer: ``tokenizer.json``.
        model: Its part ``model``.
        vocabulary: Number of each token by its text.
        added: Added tokens by number.
        settings: ``tokenizer_config.json``, completed by ``special_tokens_map.json``.
        config: ``config.json``.
        generation: ``generation_config.json``.
        kind: Kind of the part ``model``.
    """

    folder: Path
    tokenizer: Mapping[str, Any]
    model: Mapping[str, Any]
    vocabulary: Mapping[str, int]
    added: Mapping[int, AddedToken]
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    kind: str = BYTES_OR_SPACES

    def number_of(self, text: str) -> int | None:
        """Return the number of the token with this text; None if there is none."""
        return next((each.id for each in self.added.values() if each.content == text), self.vocabulary.get(text))

    def number_of_setting(self, name: str) -> int | None:
        """Return the number of the token under a key of the tokenizer's settings, such as ``eos_token``; None without one."""
        value = self.settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        return self.number_of(text) if isinstance(text, str) else None


def read_files(folder: Path) -> TokenizerFiles:
    """Read the files of a tokenizer.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: a file is missing or too large, or llama.cpp has no code for such a tokenizer.
    """
    tokenizer = _read_document(folder, TOKENIZER, required=True)
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        raise unsupported_error(f"{TOKENIZER} has no model of tokens")
    kind = model.get("type", BYTES_OR_SPACES if "merges" in model else None)
    if kind not in (BYTES_OR_SPACES, WORD_PIECES, UNIGRAMS):
        raise unsupported_error(f"the tokenizer is of the kind {quoted(kind)}, for which llama.cpp has no code")
    return TokenizerFiles(
        folder=folder,
        tokenizer=tokenizer,
        model=model,
        kind=str(kind),
        vocabulary=_check_vocabulary(_numbered(model.get("vocab")) if kind == UNIGRAMS else model.get("vocab")),
        added=_read_added_tokens(tokenizer.get("added_tokens")),
        settings={**_read_document(folder, SPECIAL_TOKENS), **_read_document(folder, TOKENIZER_CONFIG)},
        config=_read_document(folder, CONFIG),
        generation=_read_document(folder, GENERATION_CONFIG),
    )


def _read_document(folder: Path, name: str, *, required: bool = False) -> dict[str, Any]:
    try:
        return read_json_object(folder / name, largest=LARGEST_LIST, lenient=True)
    except FileNotFoundError:
        if not required:
            return {}
        raise unsupported_error(
            f"the model has no {name}", "save the tokenizer with transformers beside the base model or the adapter"
        ) from None
    except (OSError, ValueError) as error:
        raise unsupported_error(
            f"{name} cannot be read: {error}", "save the tokenizer again with transformers"
        ) from error


def _numbered(entries: Any) -> dict[str, int]:
    """Return the numbers of tokens that are listed with their scores. A text that occurs twice keeps its first number."""
    listed = entries if isinstance(entries, list) else []
    numbers: dict[str, int] = {}
    for number, entry in enumerate(listed):
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise unsupported_error(f"{TOKENIZER} has {quoted(entry)} among its tokens, which is no text with a score")
        numbers.setdefault(entry[0], number)
    return numbers


def _check_vocabulary(entries: Any) -> dict[str, int]:
    """Check the numbers of the tokens: each is at least 0, and none occurs twice."""
    if not isinstance(entries, dict) or not entries:
        raise unsupported_error(f"{TOKENIZER} has no vocabulary")
    if len(entries) > MOST_TOKENS:
        raise unsupported_error(f"the vocabulary has {len(entries)} tokens, more than {MOST_TOKENS}")
    seen = set()
    for text, number in entries.items():
        _check_token(text, number)
        if number in seen:
            raise unsupported_error(
                f"two tokens of the vocabulary have the number {number}, one of them is {quoted(text)}"
            )
        seen.add(number)
    return entries


def _read_added_tokens(entries: Any) -> dict[int, AddedToken]:
    tokens: dict[int, AddedToken] = {}
    for each in entries if isinstance(entries, list) else []:
        if not isinstance(each, dict):
            raise unsupported_error(f"{TOKENIZER} has {quoted(each)} among its added tokens")
        content, number = each.get("content"), each.get("id")
        _check_token(content, number)
        assert isinstance(content, str)
        assert isinstance(number, int)
        strips = any(bool(each.get(flag)) for flag in ("lstrip", "rstrip", "single_word"))
        tokens[number] = AddedToken(number, content, bool(each.get("special")), strips)
    return tokens


def _check_token(text: Any, number: Any) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < MOST_TOKENS:
        raise unsupported_error(
            f"the token {quoted(text)} has the number {quoted(number)}, which is none from 0 to {MOST_TOKENS}"
        )
    if not isinstance(text, str) or len(text.encode(errors="surrogatepass")) > MOST_TOKEN_BYTES or "\0" in text:
        raise unsupported_error(
            f"token {number} is {quoted(text)}: not a text of at most {MOST_TOKEN_BYTES} bytes without NUL"
        )


def templates_of(files: TokenizerFiles) -> dict[str, str]:
    """Return the templates by name; as in transformers, separate files have priority over the tokenizer's settings.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: a file cannot be read, or there are too many.
    """
    value = files.settings.get("chat_template")
    listed = value if isinstance(value, list) else [{"name": DEFAULT, "template": value}]
    templates = {str(each.get("name")): each.get("template") for each in listed if isinstance(each, Mapping)}
    plain, packed = (files.folder / name for name in CHAT_TEMPLATES)
    paths = sorted((files.folder / CHAT_TEMPLATE_FOLDER).glob("*.jinja"))
    try:
        if packed.is_file():
            templates[DEFAULT] = read_json_object(packed, largest=_LARGEST, lenient=True).get("chat_template")
        for name, path in [(DEFAULT, plain), *((path.stem, path) for path in paths[: _MOST + 1])]:
            if path.is_file():
                templates[name] = read_regular(path, largest=_LARGEST).decode("utf-8")
    except (OSError, ValueError) as error:
        raise unsupported_error(
            f"a chat template cannot be read: {error}", "save the tokenizer again with transformers"
        ) from error
    kept = {name: text for name, text in templates.items() if isinstance(text, str) and text and _NAME.fullmatch(name)}
    if len(kept) > _MOST:
        raise unsupported_error(f"the tokenizer has {len(kept)} chat templates, more than {_MOST}")
    return kept
