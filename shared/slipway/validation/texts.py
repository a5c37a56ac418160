"""Texts and conversations on which runtimes part, and the comparison of what a runtime reads of them with what transformers reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slipway.validation.verdicts import Value

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Name of the place"}},
            "required": ["place"],
        },
    },
}


class TextKind(StrEnum):
    """Kind of a text that is hard to split into tokens. An output may name kinds that its runtime is known to split otherwise."""

    WORDS = "words"
    DIGITS = "digits"
    CODE = "code"
    CJK = "CJK"
    EMOJI = "emoji"
    LEADING = "a space at the begin"
    SPACES = "runs of spaces"
    CASED = "letters of two cases"
    MARKS = "marks on letters"
    DECOMPOSED = "letters apart from their marks"
    SPECIAL = "special tokens"
    SPECIAL_SPACES = "spaces beside special tokens"
    LONG = "long words"


class TextComparison(Value):
    """What a runtime reads with the tokenizer and chat template of an output, compared with transformers.

    Attributes:
        texts: Number of texts that were split into tokens.
        different: Number of them with other tokens.
        excused: Number of further ones of kinds that the runtime is known to split otherwise.
        excused_kinds: These kinds.
        first_difference: The first text with other tokens, and both readings.
        conversations: Number of conversations that were rendered.
        rendered_otherwise: Number of them with another result.
        first_rendered: The shortest of them, and both results.
        further: Number of conversations with calls of tools, or with thinking switched, that were rendered too.
        further_otherwise: Number of them with another result.
        first_further: The shortest of them, and both results.
        template_missing: Whether the output has no chat template though the model has one.
        not_compared: Why nothing was compared; empty otherwise.
    """

    texts: int = 0
    different: int = 0
    excused: int = 0
    excused_kinds: tuple[str, ...] = ()
    first_difference: str = ""
    conversations: int = 0
    rendered_otherwise: int = 0
    first_rendered: str = ""
    further: int = 0
    further_otherwise: int = 0
    first_further: str = ""
    template_missing: bool = False
    not_compared: str = ""


TEXTS: Mapping[TextKind, tuple[str, ...]] = {
    TextKind.WORDS: (
        "",
        "The quick brown fox jumps over the lazy dog.",
        "I'm sure you're right: they've said he'd go, we'll see, and it'S NOT 'RE or 'LL.",
        "Ein Satz mit Umlauten: Äpfel, Öl, Übermut, groß; un été très chaud à Noël.",
        "Some… “quoted” text — with dashes – and ‘marks’ !!! ??? ...... ====---",
    ),
    TextKind.DIGITS: (
        "1 12 123 1234 12345 123456 1234567 12345678 123456789",
        "3.14159, 1,000,000.00 -5 +49-170/1234567 0x7fff 1e-10 2026-11-23T03:04:05",
        "a1b22c333 ½ ² ٣٤٥ Ⅷ 一二三",
    ),
    TextKind.CODE: (
        "def f(x):\n    if x is None:\n        return [i ** 2 for i in range(10)]\n\n\n    return {**x}\n",
        'for (int i=0;i<n;++i){\n\tprintf("%d\\n", a[i]);\n\t\t}\r\n#include <stdio.h>\r\n',
        '{"key": ["value", null, true], "url": "https://example.org/a?b=c&d=%20#e"}',
        "SELECT * FROM t WHERE a<>'x' AND b>=10; -- comment\n<div class=\"a\">&nbsp;</div>",
    ),
    TextKind.CJK: (
        "你好，世界！今天天气怎么样？我在北京工作了3年。",
        "吾輩は猫である。名前はまだ無い。カタカナとひらがな。",
        "안녕하세요. 오늘 날씨가 좋네요. abc한글def",
    ),
    TextKind.EMOJI: (
        "🚀 ✅ 😶‍🌫️ 👩‍👩‍👧‍👦 🇩🇪🇯🇵 👍🏽👍🏿 ☕️ ❤️‍🔥",
        "text🦙text🦙🦙 ∑∫√≠≤ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈",
        "\u200bzero\u200dwidth\ufeff and \u00a0no-break\u3000wide",
    ),
    TextKind.LEADING: (" ", " a space at either end ", "  two spaces"),
    TextKind.SPACES: (
        "\n",
        "\n\n\n \n  \n   \n",
        "a  b   c    d     e        f                g",
        "\t\ttab\t \ttab\n\t\n \t\n",
        "line\r\nline\r\n\r\n  indented\n    more\n        most   \n",
    ),
    TextKind.CASED: ("Привет, МИР! ПрИвЕт ЁЖИК", "ΑΒΓ αβγ Ὀδυσσεύς", "HTTPServer camelCaseWord İstanbul ŁÓDŹ ǅ"),
    TextKind.MARKS: ("สวัสดีครับ ภาษาไทย नमस्ते दुनिया", "हिन्दी में निर्देश", "כָּל בְּנֵי הָאָדָם", "العَرَبِيَّة", "កាន់តែពិសេស"),
    TextKind.DECOMPOSED: ("e\u0301te\u0301 A\u030angstro\u0308m", "n\u0303 \u1100\u1161\u11a8", "\u212b \ufb01"),
    TextKind.LONG: ("a" * 300, "Donaudampfschifffahrtsgesellschaft" * 8, "=" * 257, "ab1" * 60, "漢" * 130),
}
"""By kind; none has a special token."""


def _turns(*texts: str, system: str = "") -> tuple[dict[str, Any], ...]:
    """Return messages of user and assistant in turn, after one of the system."""
    before = ({"role": "system", "content": system},) if system else ()
    return (
        *before,
        *({"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)),
    )


@dataclass(frozen=True, slots=True)
class HardConversation:
    """A conversation to be rendered.

    Attributes:
        messages: Its messages.
        tools: Tools that are offered.
        options: What a template is given beside them.
        needs: Texts in a template that takes such a conversation.
        judged: Whether another prompt is a fault. Calls of tools and switches of thinking are told to runtimes in forms of their own, so a difference
            there is named only.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    judged: bool = True

    def fits(self, template: str) -> bool:
        """Return whether a template takes it."""
        return all(text in template for text in self.needs)


def _call(number: int, place: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"place": place}}
    return {
        "type": "function",
        "id": f"call0000{number}",
        "function": function,
    }  # Mistral's templates want nine letters


def _result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "get_weather", "content": text}


_ASKED = _turns("What is the weather in Paris?")
_CALLED = (
    *_ASKED,
    {"role": "assistant", "content": "", "tool_calls": [_call(1, "Paris")]},
    _result(1, '{"degrees": 21}'),
)
_CALLED_TWICE = (
    *_turns("What is the weather in Paris and Łódź?", system="Use tools."),
    {"role": "assistant", "content": "Let me see.", "tool_calls": [_call(1, "Paris"), _call(2, "Łódź")]},
    _result(1, "21 degrees"),
    _result(2, "<rain>"),
    *({"role": role, "content": text} for role, text in (("assistant", "21 degrees, and rain."), ("user", "And now?"))),
)
_TALK = _turns("Hello", "Hello! How can I help?", "Tell me a story.", system="You are brief.")
_THINKING = "enable_thinking"

CONVERSATIONS: Mapping[str, HardConversation] = {
    "a question": HardConversation(_turns("What is 2 + 2?")),
    "a system message": HardConversation(_turns("Name a colour.", system="You are brief.")),
    "several turns": HardConversation(_turns("Hello", "Hello! How can I help?", "Tell me a story.")),
    "lines, code and other scripts": HardConversation(
        _turns("Explain:\n\n```python\nprint('ä🚀')\n```\n", "It prints `ä🚀`.", "谢谢 <b>ok</b>", system=" Be exact. ")
    ),
    "tools": HardConversation(_ASKED, (_TOOL,), needs=("tools",)),
    "a tool's call and its result": HardConversation(_CALLED, (_TOOL,), needs=("tools", "tool_calls"), judged=False),
    "two calls with a system message and further turns": HardConversation(
        _CALLED_TWICE, (_TOOL,), needs=("tools", "tool_calls"), judged=False
    ),
    "a question with thinking": HardConversation(
        _turns("What is 2 + 2?"), options={_THINKING: True}, needs=(_THINKING,), judged=False
    ),
    "a question without thinking": HardConversation(
        _turns("What is 2 + 2?"), options={_THINKING: False}, needs=(_THINKING,), judged=False
    ),
    "several turns without thinking": HardConversation(
        _TALK, options={_THINKING: False}, needs=(_THINKING,), judged=False
    ),
    "a tool's call without thinking": HardConversation(
        _CALLED, (_TOOL,), options={_THINKING: False}, needs=("tools", "tool_calls", _THINKING), judged=False
    ),
}
"""By name; for each template those that it takes."""
