"""Find a model's chat templates, the default one and named ones."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slipway.files.json_documents import read_json_object
from slipway.files.regular_file import read_regular
from slipway.model.model_files import CHAT_TEMPLATE_FOLDER, CHAT_TEMPLATES
from slipway_gguf.vocabulary.documents import TokenizerFiles, unsupported

DEFAULT = "default"
_LARGEST = 1 << 20
_MOST = 32
_NAME = re.compile(r"[a-z0-9_]{1,64}")


def templates_of(files: TokenizerFiles) -> dict[str, str]:
    """Return the templates by name, in transformers' order: files of their own go before the tokenizer's settings.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: a file cannot be read, or there are too many.
    """
    value = files.settings.get("chat_template")
    listed = value if isinstance(value, list) else [{"name": DEFAULT, "template": value}]
    found = {str(each.get("name")): each.get("template") for each in listed if isinstance(each, Mapping)}
    plain, packed = (files.folder / name for name in CHAT_TEMPLATES)
    paths = sorted((files.folder / CHAT_TEMPLATE_FOLDER).glob("*.jinja"))
    try:
        if packed.is_file():
            found[DEFAULT] = read_json_object(packed, largest=_LARGEST, lenient=True).get("chat_template")
        for name, path in [(DEFAULT, plain), *((path.stem, path) for path in paths[: _MOST + 1])]:
            if path.is_file():
                found[name] = read_regular(path, largest=_LARGEST).decode("utf-8")
    except (OSError, ValueError) as error:
        raise unsupported(
            f"a chat template cannot be read: {error}", "save the tokenizer again with transformers"
        ) from error
    kept = {name: text for name, text in found.items() if isinstance(text, str) and text and _NAME.fullmatch(name)}
    if len(kept) > _MOST:
        raise unsupported(f"the tokenizer has {len(kept)} chat templates, more than {_MOST}")
    return kept
