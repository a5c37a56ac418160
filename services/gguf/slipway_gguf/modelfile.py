"""Write an Ollama ``Modelfile`` beside a GGUF file: the template in Ollama's language, stop tokens, and parameters of sampling.

Ollama reads a chat template of its own language only, and knows most templates of ``tokenizer.chat_template`` by their text. A template that
is known here by what it renders is written; for others the file's own is left to Ollama.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway_gguf.vocabulary.documents import TokenizerFiles, read_files
from slipway_gguf.vocabulary.marks import numbers_of
from slipway_gguf.vocabulary.templates import DEFAULT, templates_of

NAME = "Modelfile"
_MANY = 1 << 30
_TURNS = "{{{{ range .Messages }}}}{turn}{{{{ end }}}}{answer}"
KNOWN: Mapping[str, tuple[tuple[str, ...], str]] = {
    "chatml": (
        ("<|im_start|>", "<|im_end|>"),
        _TURNS.format(
            turn="<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n",
            answer="<|im_start|>assistant\n",
        ),
    ),
    "llama3": (
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        _TURNS.format(
            turn="<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>",
            answer="<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ),
    "gemma": (
        ("<start_of_turn>", "<end_of_turn>"),
        _TURNS.format(
            turn='<start_of_turn>{{ if eq .Role "assistant" }}model{{ else }}{{ .Role }}{{ end }}\n{{ .Content }}<end_of_turn>\n',
            answer="<start_of_turn>model\n",
        ),
    ),
    "phi3": (
        ("<|user|>", "<|end|>", "<|assistant|>"),
        _TURNS.format(turn="<|{{ .Role }}|>\n{{ .Content }}<|end|>\n", answer="<|assistant|>\n"),
    ),
}
"""Templates in Ollama's language, by what the chat template must contain."""
_REFUSALS = re.compile(r"raise_exception\([^)]*\)|\{#.*?#\}", re.DOTALL)
_CODE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
_TEXT = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""")
_NAMES = {"", "role", "content", "messages", "system", "user", "assistant", "model"}
"""Texts that any template's code may have: names of keys and roles."""
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
    files = read_files(model)
    template = templates_of(files).get(DEFAULT, "")
    lines = [f"FROM ./{file_name}"]
    known = ollama_template(template)
    if known:
        lines.append(f"TEMPLATE {quoted(known)}")
    lines += [f"PARAMETER stop {quoted(text)}" for text in _stops(files, template)]
    lines += [f"PARAMETER {name} {value}" for name, value in _sampling(files.generation)]
    (folder / NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")


def ollama_template(template: str) -> str:
    """Return a chat template in Ollama's language; empty if it is not one of those known here.

    A template is known if it writes the marks of one, names of roles, and nothing else: no instructions, no tools.
    """
    for marks, text in KNOWN.values():
        if all(mark in template for mark in marks) and all(_is_plain(each, marks) for each in _texts(template)):
            return text
    return ""


def _texts(template: str) -> list[str]:
    """Return the texts that a template can write: those in its code, and what lies between."""
    code = _REFUSALS.sub("", template)
    inside = [one or other for piece in _CODE.findall(code) for one, other in _TEXT.findall(piece)]
    return [text.replace("\\n", "\n") for text in (*inside, *_CODE.split(code))]


def _is_plain(text: str, marks: tuple[str, ...]) -> bool:
    for mark in sorted(marks, key=len, reverse=True):
        text = text.replace(mark, "")
    return text.strip() in _NAMES


def quoted(text: str) -> str:
    """Quote a value for a ``Modelfile``: within three quotes if it has a line break or a quote."""
    if '"""' in text:
        raise ValueError(f"a Modelfile cannot hold {text!r}")
    plain = not {'"', "\n", "\\"} & set(text)
    return f'"{text}"' if plain else f'"""{text}"""'


def _stops(files: TokenizerFiles, template: str) -> list[str]:
    """Return the texts that end an answer."""
    numbers = numbers_of(files, rows=_MANY, template=template)
    ends = {numbers[name] for name in ("eos", "eot", "eom") if name in numbers}
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
            found.append((_OLLAMA.get(name, name), f"{kind(value):g}"))
    return found
