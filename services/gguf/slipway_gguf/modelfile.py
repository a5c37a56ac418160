"""Write an Ollama ``Modelfile`` beside a GGUF file: the template in Ollama's language, stop tokens, and parameters of sampling.

Ollama reads a chat template of its own language only, and knows most templates of ``tokenizer.chat_template`` by their text. A template that
renders conversations like one known here is written; for others the file's own is left to Ollama.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipway_gguf.conversations import ollama_template
from slipway_gguf.vocabulary.documents import TokenizerFiles, read_files
from slipway_gguf.vocabulary.marks import ends_of, numbers_of
from slipway_gguf.vocabulary.templates import DEFAULT, templates_of

NAME = "Modelfile"
BASE = "base.gguf"
"""Name under which a ``Modelfile`` of an adapter expects the base's file."""
_MANY = 1 << 30
_SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
_OLLAMA = {"repetition_penalty": "repeat_penalty"}


def write(folder: Path, file_name: str, model: Path) -> None:
    """Write the ``Modelfile`` for a GGUF file of the same folder.

    Args:
        folder: Folder of the file.
        file_name: The file's name.
        model: The model's folder.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: the tokenizer's files cannot be read.
    """
    _write(folder, [f"FROM ./{file_name}"], read_files(model))


def write_beside(folder: Path, file_name: str, files: TokenizerFiles) -> None:
    """Write the ``Modelfile`` for an adapter's file of the same folder, beside which the user puts one of the base.

    Args:
        folder: Folder of the file.
        file_name: The file's name.
        files: Files of the adapter's tokenizer, and the base's generation config.
    """
    said = f"# Put a GGUF file of the base model here as {BASE}, at any level, or name the base as Ollama has it."
    _write(folder, [said, f"FROM ./{BASE}", f"ADAPTER ./{file_name}"], files)


def _write(folder: Path, lines: list[str], files: TokenizerFiles) -> None:
    template = templates_of(files).get(DEFAULT, "")
    known = ollama_template(template, files)
    if known:
        lines.append(f"TEMPLATE {quoted(known)}")
    lines += [f"PARAMETER stop {quoted(text)}" for text in _stops(files, template)]
    lines += [f"PARAMETER {name} {value}" for name, value in _sampling(files.generation)]
    (folder / NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")


def quoted(text: str) -> str:
    """Quote a value for a ``Modelfile``: within three quotes if it has a line break or a quote."""
    if '"""' in text:
        raise ValueError(f"a Modelfile cannot hold {text!r}")
    plain = not {'"', "\n", "\\"} & set(text)
    return f'"{text}"' if plain else f'"""{text}"""'


def _stops(files: TokenizerFiles, template: str) -> list[str]:
    """Return the texts that end an answer: more of them than a GGUF file has keys for."""
    numbers = numbers_of(files, rows=_MANY, template=template)
    ends = {numbers[name] for name in ("eos", "eot", "eom") if name in numbers} | set(ends_of(files, rows=_MANY))
    texts = {number: text for text, number in files.vocabulary.items() if number in ends}
    texts |= {number: added.content for number, added in files.added.items() if number in ends}
    return [text for _, text in sorted(texts.items()) if '"""' not in text and not text.endswith('"')]


def _sampling(generation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return parameters of sampling; greedy choice is a temperature of 0."""
    if generation.get("do_sample") is False:
        return [("temperature", "0")]
    found = []
    for name, kind in _SAMPLING.items():
        value = generation.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _MANY:
            found.append((_OLLAMA.get(name, name), _plain_number(kind(value))))
    return found


def _plain_number(value: float) -> str:
    """Return a number without an exponent, which Ollama does not read as a whole number."""
    return f"{value:d}" if isinstance(value, int) else np.format_float_positional(value, trim="-")
