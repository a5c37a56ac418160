"""Conversations by a model's chat template: as transformers writes them, and within limits."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from slipway.machine.bounded.process import Bounds
from slipway.model.chat_templates import ChatTemplates, EndlessTemplateError, TemplateError
from slipway.validation.texts import CONVERSATIONS, HardConversation
from support.hostile.endless import GROWS, HALVES, LOOPS

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% generation %}{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endgeneration %}{% endfor %}"
    "{{ enable_thinking }}"
    "{% if add_generation_prompt %}<assistant>{{ date_string }}{{ strftime_now('%Y') }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello", "name": None, "thinking": "hm"}]


def tokenizer(template: Any) -> Any:
    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", chat_template=template)


def test_they_are_those_of_transformers() -> None:
    for template in (TEMPLATE, {"default": "none", "tool_use": TEMPLATE}):
        one = tokenizer(template)
        with ChatTemplates() as templates:
            for each in [*CONVERSATIONS.values(), HardConversation(tuple(HELLO))]:
                options = {"tools": list(each.tools) or None, "add_generation_prompt": True, "date_string": "today"}
                options |= each.options
                wanted = one.apply_chat_template(list(each.messages), tokenize=False, **options)
                assert templates.text(one, each.messages, **options) == wanted


@pytest.mark.parametrize(
    ("template", "error", "said"),
    [
        (LOOPS, EndlessTemplateError, "chat template takes more than 1 s of processor time"),
        (GROWS, EndlessTemplateError, "chat template needs more than 268.4 MB of memory"),
        (HALVES, TemplateError, "half of a character"),
        ("{{ 'a' * 20000000 }}", TemplateError, "20000000 characters"),
        ("{{ raise_exception('no') }}", TemplateError, "no"),
        ({"one": "a"}, TemplateError, "template"),
    ],
)
def test_what_is_no_conversation_is_said(template: Any, error: type[Exception], said: str) -> None:
    began = time.monotonic()
    with ChatTemplates(Bounds(seconds=1.0, memory_bytes=1 << 28)) as templates, pytest.raises(error, match=said):
        templates.text(tokenizer(template), HELLO)
    assert time.monotonic() - began < 30
