"""Copy the tokenizer and the chat template of the training beside an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path

from slipway.files.links import real_file
from slipway.models.model_files import (
    CHAT_TEMPLATE_FOLDER,
    CHAT_TEMPLATES,
    has_chat_template,
    templates_among_settings,
    tokenizer_files,
)


def copy_tokenizer(adapter: Path, base: Path, output: Path) -> list[str]:
    """Copy the checkpoint's tokenizer if it has one, otherwise the base's; the base's chat template if the checkpoint has none.

    Returns:
        Names of the copied files, sorted.
    """
    own = _names(adapter)
    source = adapter if any(not _is_template(name) for name in own) else base
    chosen = {name: source for name in _names(source) if not _is_template(name)}
    templates = adapter if has_chat_template(adapter) else base
    chosen |= {name: templates for name in _names(templates) if _is_template(name)}
    among_settings = templates is not source and not any(map(_is_template, chosen))
    written = templates_among_settings(templates) if among_settings else {}
    for name, folder in sorted(chosen.items()):
        target = output / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(real_file(folder, name), target)
    for name, text in written.items():
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_bytes(text)
    return sorted({*chosen, *written})


def _names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in tokenizer_files(folder)]


def _is_template(name: str) -> bool:
    return name in CHAT_TEMPLATES or name.startswith(f"{CHAT_TEMPLATE_FOLDER}/")
