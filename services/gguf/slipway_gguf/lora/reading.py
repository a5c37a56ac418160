"""Add beside an adapter's file what reads text and conversations with it: tokenizer, chat template, and an Ollama ``Modelfile``.

llama.cpp reads text with the vocabulary of the base's file, and takes a chat template as a setting (``--chat-template-file``).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from slipway.files.links import real_file
from slipway.model.model_files import CHAT_TEMPLATES, tokenizer_files
from slipway.stage import Context
from slipway.texts import quoted
from slipway_gguf import modelfile
from slipway_gguf.vocabulary.documents import TOKENIZER, TokenizerFiles, read_files
from slipway_gguf.vocabulary.templates import DEFAULT, templates_of


def add_reading(adapter: Path, base: Path, file: Path, ctx: Context) -> None:
    """Add the adapter's tokenizer files, or the base's if it has none, its chat template as a file, and the ``Modelfile``.

    Args:
        adapter: Folder of the adapter.
        base: Folder of the base.
        file: The adapter's file in the folder of the output.
        ctx: The stage; a token that the base lacks is a warning.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``.
    """
    source, folder = (adapter if (adapter / TOKENIZER).is_file() else base), file.parent
    for path in tokenizer_files(source):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(real_file(source, path.relative_to(source)), target)
    of_base = read_files(base)
    files = replace(read_files(folder), config=of_base.config, generation=of_base.generation)
    lacking = sorted(_numbers(files).items() - _numbers(of_base).items(), key=lambda pair: pair[1])
    if lacking:
        ctx.warn(
            f"the adapter's tokenizer has {len(lacking)} tokens that the base's lacks, first {quoted(lacking[0][0])}: llama.cpp reads text with "
            "the base's file, and would split them; the merged model has them"
        )
    template = templates_of(files).get(DEFAULT, "")
    if template:
        (folder / CHAT_TEMPLATES[0]).write_text(template, encoding="utf-8")
    modelfile.write_beside(folder, file.name, files)


def _numbers(files: TokenizerFiles) -> Mapping[str, int]:
    return {**files.vocabulary, **{each.content: number for number, each in files.added.items()}}
