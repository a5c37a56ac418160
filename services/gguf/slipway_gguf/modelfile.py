"""Write an Ollama ``Modelfile`` beside a GGUF file: the template in Ollama's language, stop tokens, and parameters of sampling.

Ollama reads only chat templates in its own language, and recognises most templates of ``tokenizer.chat_template`` by their text. If the
model's template renders conversations like one known here, that one is written; otherwise Ollama uses the GGUF file's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipway_gguf.vocabulary.around import around_decoded
from slipway_gguf.vocabulary.documents import DEFAULT, TokenizerFiles, read_files, templates_of
from slipway_gguf.vocabulary.rendering import render
from slipway_gguf.vocabulary.tokens import end_token_ids, special_token_ids

NAME = "Modelfile"
BASE = "base.gguf"
"""Name of the base's file in the ``Modelfile`` of an adapter."""
_IMAGES = "# For images, remove the # from the next line; not every version of Ollama runs every model with it."
_MANY = 1 << 30
_SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
_OLLAMA = {"repetition_penalty": "repeat_penalty"}

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

Message = Mapping[str, str]
_SYSTEM: Message = {"role": "system", "content": "Be Brief,  and\n\nkind."}
_USER: Message = {"role": "user", "content": "What is in\n  Ågren's {{ box }}?"}
_ASSISTANT: Message = {"role": "assistant", "content": "<think>\nA box.\n</think>\n\nNothing."}
_CONVERSATIONS: tuple[tuple[Message, ...], ...] = (
    (_USER,),
    (_SYSTEM, _USER),
    (_USER, _ASSISTANT, {"role": "user", "content": "sure?"}),
    (_SYSTEM, _USER, _ASSISTANT, {"role": "user", "content": "Why"}, _ASSISTANT, {"role": "user", "content": "ok"}),
)
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
"""Tools for a comparison: a template that describes them to the model equals none that is known here."""


def write(folder: Path, file_name: str, model: Path, *, projector: str = "", chats: bool = True) -> None:
    """Write the ``Modelfile`` for a GGUF file in the same folder.

    Args:
        folder: Folder of the file.
        file_name: The file's name.
        model: The model's folder.
        projector: Name of the ``mmproj`` file beside it; empty if there is none.
        chats: Whether the model answers; one that makes vectors needs neither template nor stops.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: the tokenizer's files cannot be read.
    """
    # Ollama takes a second FROM as the part for images, but some versions then fail to load models that they run on text alone.
    images = [_IMAGES, f"# FROM ./{projector}"] if projector else []
    if not chats:
        (folder / NAME).write_text(f"FROM ./{file_name}\n", encoding="utf-8")
        return
    _write(folder, [f"FROM ./{file_name}", *images], read_files(model))


def write_for_adapter(folder: Path, file_name: str, files: TokenizerFiles) -> None:
    """Write the ``Modelfile`` for an adapter's file in the same folder, where the user also puts a file of the base.

    Args:
        folder: Folder of the file.
        file_name: The file's name.
        files: Files of the adapter's tokenizer, and the base's generation config.
    """
    comment = f"# Put a GGUF file of the base model here as {BASE}, at any level, or name the base as Ollama has it."
    _write(folder, [comment, f"FROM ./{BASE}", f"ADAPTER ./{file_name}"], files)


def _write(folder: Path, lines: list[str], files: TokenizerFiles) -> None:
    template = templates_of(files).get(DEFAULT, "")
    known = ollama_template(template, files)
    if known:
        lines.append(f"TEMPLATE {quote(known)}")
    lines += [f"PARAMETER stop {quote(text)}" for text in _stops(files, template)]
    lines += [f"PARAMETER {name} {value}" for name, value in _sampling(files.generation)]
    (folder / NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")


def quote(text: str) -> str:
    """Quote a value for a ``Modelfile``: within three quotes if it has a line break or a quote."""
    if '"""' in text:
        raise ValueError(f"a Modelfile cannot hold {text!r}")
    plain = not {'"', "\n", "\\"} & set(text)
    return f'"{text}"' if plain else f'"""{text}"""'


def _stops(files: TokenizerFiles, template: str) -> list[str]:
    """Return the texts that end an answer; there may be more than a GGUF file has keys for."""
    numbers = special_token_ids(files, rows=_MANY, template=template)
    ends = {numbers[name] for name in ("eos", "eot", "eom") if name in numbers} | set(end_token_ids(files, rows=_MANY))
    texts = {number: text for text, number in files.vocabulary.items() if number in ends}
    texts |= {number: added.content for number, added in files.added.items() if number in ends}
    return [text for _, text in sorted(texts.items()) if '"""' not in text and not text.endswith('"')]


def _sampling(generation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return parameters of sampling; greedy choice is a temperature of 0."""
    if generation.get("do_sample") is False:
        return [("temperature", "0")]
    parameters = []
    for name, kind in _SAMPLING.items():
        value = generation.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _MANY:
            parameters.append((_OLLAMA.get(name, name), _plain_number(kind(value))))
    return parameters


def _plain_number(value: float) -> str:
    """Format a number without an exponent: Ollama reads none in whole numbers."""
    return f"{value:d}" if isinstance(value, int) else np.format_float_positional(value, trim="-")


@dataclass(frozen=True, slots=True)
class Turns:
    """A simple template: every message is written alike, then the beginning of an answer.

    Attributes:
        marks: Texts that a chat template of this kind contains.
        turn: A message; ``ROLE`` and ``CONTENT`` stand for its parts.
        answer: Text behind the last message.
        names: Names of roles that differ from the message's.
    """

    marks: tuple[str, ...]
    turn: str
    answer: str
    names: Mapping[str, str] = field(default_factory=dict)

    def to_ollama(self) -> str:
        """Return the template in Ollama's language."""
        role = "{{ .Role }}"
        for plain, name in self.names.items():
            role = f'{{{{ if eq .Role "{plain}" }}}}{name}{{{{ else }}}}{role}{{{{ end }}}}'
        turn = self.turn.replace("ROLE", role).replace("CONTENT", "{{ .Content }}")
        return f"{{{{ range .Messages }}}}{turn}{{{{ end }}}}{self.answer}"

    def text(self, messages: Sequence[Message]) -> str:
        """Return a conversation as Ollama renders it with this template."""
        turns = (
            self.turn.replace("ROLE", self.names.get(each["role"], each["role"])).replace("CONTENT", each["content"])
            for each in messages
        )
        return "".join(turns) + self.answer


KNOWN: Mapping[str, Turns] = {
    "chatml": Turns(("<|im_start|>", "<|im_end|>"), "<|im_start|>ROLE\nCONTENT<|im_end|>\n", "<|im_start|>assistant\n"),
    "llama3": Turns(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|start_header_id|>ROLE<|end_header_id|>\n\nCONTENT<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": Turns(
        ("<start_of_turn>", "<end_of_turn>"),
        "<start_of_turn>ROLE\nCONTENT<end_of_turn>\n",
        "<start_of_turn>model\n",
        names={"assistant": "model"},
    ),
    "phi3": Turns(("<|user|>", "<|end|>", "<|assistant|>"), "<|ROLE|>\nCONTENT<|end|>\n", "<|assistant|>\n"),
}


def ollama_template(template: str, files: TokenizerFiles) -> str:
    """Return a chat template in Ollama's language; empty if no template known here writes the same.

    Both are compared on fixed conversations with and without a system message, past answers and tools, and with thinking on and off where the template
    switches it. Spaces around a message are not
    compared, because some chat templates cut them off. The begin-of-text token may be missing if llama.cpp adds it.

    Args:
        template: The model's chat template.
        files: The model's tokenizer.
    """
    candidates = [each for each in KNOWN.values() if all(mark in template for mark in each.marks)]
    if not candidates:
        return ""
    special = {name: text for name in _TOKENS if (text := _text_of(files, name)) is not None}
    around, _ = around_decoded(files, special_token_ids(files, rows=_MANY, template=template))
    begin = special.get("bos_token", "") if around.begin is not None else ""
    # A template that switches thinking writes more than messages, which Ollama does by the file's own template.
    thinking = ({}, *({"enable_thinking": on} for on in (True, False))) if "enable_thinking" in template else ({},)
    asked = [
        (messages, {"tools": tools, **options})
        for messages in _CONVERSATIONS
        for tools in (None, [_TOOL])
        for options in thinking
    ]
    rendered = render(template, [{"messages": messages, **options, **special} for messages, options in asked])
    texts = [text.removeprefix(begin) for text in rendered]
    return next(
        (each.to_ollama() for each in candidates if texts == [each.text(messages) for messages, _ in asked]), ""
    )


def _text_of(files: TokenizerFiles, name: str) -> str | None:
    value = files.settings.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
