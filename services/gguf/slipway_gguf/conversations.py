"""Find the template in Ollama's language that writes conversations as a model's chat template does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipway.machine.bounded.process import BoundedProcess, Bounds, RefusedWorkError, UnboundedWorkError
from slipway_gguf.vocabulary.documents import TokenizerFiles
from slipway_gguf.vocabulary.marks import around, numbers_of

_RENDER, _BOUNDS = "slipway_gguf.template_trial:render", Bounds()
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_MANY = 1 << 30

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Turns:
    """A plain way to write a conversation: every message alike, and then the beginning of an answer.

    Attributes:
        marks: Texts that a chat template of this kind contains.
        turn: A message; ``ROLE`` and ``CONTENT`` stand for its parts.
        answer: What is behind the last message.
        names: Names of roles, where they differ from the message's.
    """

    marks: tuple[str, ...]
    turn: str
    answer: str
    names: Mapping[str, str] = field(default_factory=dict)

    def in_ollama(self) -> str:
        """Return the template in Ollama's language."""
        role = "{{ .Role }}"
        for plain, name in self.names.items():
            role = f'{{{{ if eq .Role "{plain}" }}}}{name}{{{{ else }}}}{role}{{{{ end }}}}'
        turn = self.turn.replace("ROLE", role).replace("CONTENT", "{{ .Content }}")
        return f"{{{{ range .Messages }}}}{turn}{{{{ end }}}}{self.answer}"

    def text(self, messages: Sequence[Message]) -> str:
        """Return what Ollama makes of a conversation by this template."""
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
"""A template that tells a model about tools says more than those known here."""


def ollama_template(template: str, files: TokenizerFiles) -> str:
    """Return a chat template in Ollama's language; empty if no template known here writes the same.

    Both are compared on fixed conversations with and without a system's message, past answers and tools. Spaces around a message, which
    some chat templates cut off, are not compared. A begin of the text may be missing if llama.cpp adds it.

    Args:
        template: The model's chat template.
        files: The model's tokenizer.
    """
    candidates = [each for each in KNOWN.values() if all(mark in template for mark in each.marks)]
    if not candidates:
        return ""
    special = {name: text for name in _TOKENS if (text := _text_of(files, name)) is not None}
    begins, _ = around(files, numbers_of(files, rows=_MANY, template=template))
    begin = special.get("bos_token", "") if begins else ""
    asked = [(messages, tools) for messages in _CONVERSATIONS for tools in (None, [_TOOL])]
    rendered = _rendered(template, [{"messages": messages, "tools": tools, **special} for messages, tools in asked])
    texts = [text.removeprefix(begin) for text in rendered]
    return next(
        (each.in_ollama() for each in candidates if texts == [each.text(messages) for messages, _ in asked]), ""
    )


def _text_of(files: TokenizerFiles, name: str) -> str | None:
    value = files.settings.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _rendered(template: str, conversations: Sequence[Mapping[str, object]]) -> list[str]:
    """Render conversations in a process with limits of time and memory; none if one cannot be rendered."""
    try:
        with BoundedProcess(_RENDER, _BOUNDS, imports=("jinja2.sandbox",)) as process:
            return [str(text) for text in process.call(template, conversations)]
    except (RefusedWorkError, UnboundedWorkError):
        return []
