"""What transformers reads of hard texts and of conversations, as one process writes it and others compare with it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from slipway.validation.texts import TextKind


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReadText(_Message):
    """A text and its tokens, with those that the tokenizer puts around it."""

    kind: TextKind
    text: str
    ids: tuple[int, ...]


class Conversation(_Message):
    """A conversation, and the prompt that the chat template makes of it.

    Attributes:
        name: What it has, in words.
        messages: Its messages.
        tools: Tools that are offered.
        prompt: The prompt, which ends where the model's answer begins.
    """

    name: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str


class ReadTexts(_Message):
    """What transformers reads.

    Attributes:
        texts: Hard texts.
        conversations: Conversations that the chat template takes; none without a template.
        begin: Text of the token that begins each text, which a runtime may put there itself.
    """

    texts: tuple[ReadText, ...]
    conversations: tuple[Conversation, ...] = ()
    begin: str = ""
