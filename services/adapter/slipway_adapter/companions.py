"""Copy the tokenizer and the chat template of the training beside an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path

from slipway.files.links import real_file
from slipway.model.model_files import (
    chat_templates,
    has_chat_template,
    is_chat_template,
    tokenizer_files,
)


def copy_tokenizer(adapter: Path, base: Path, output: Path) -> list[str]:
    """Copy the checkpoint's tokenizer if it has one, otherwise the base's; the base's chat template if the checkpoint has none.

    Returns:
        Names of the copied files, sorted.
    """
    tokenizer = adapter if any(not is_chat_template(name) for name in _names(adapter)) else base
    chosen = {name: tokenizer for name in _names(tokenizer) if not is_chat_template(name)}
    written: dict[str, bytes] = {}
    if tokenizer is adapter and not has_chat_template(adapter):
        written = chat_templates(base)  # also those among the settings of the base's tokenizer, which do not travel
    else:
        templates = adapter if has_chat_template(adapter) else base
        chosen |= {name: templates for name in _names(templates) if is_chat_template(name)}
    for name, folder in chosen.items():
        target = output / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(real_file(folder, name), target)
    for name, text in written.items():
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_bytes(text)
    return sorted({*chosen, *written})


def _names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in tokenizer_files(folder)]
