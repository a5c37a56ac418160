"""Write conversations by a model's chat template, which is a program: it may loop, or write without end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from slipway.machine.bounded.process import BoundedProcess, Bounds, RefusedWorkError, UnboundedWorkError
from slipway.texts import one_line, shortened

_FUNCTION = "slipway.model.chat_templates:render"
_LIBRARY = "transformers.utils.chat_template_utils"
_LONGEST = 16 << 20
"""Most characters of one conversation."""
_SHOWN = 300


class TemplateError(Exception):
    """A chat template does not write a conversation; the text says what it does instead."""


class EndlessTemplateError(TemplateError):
    """It does not end within its limits, and so it may write no conversation at all."""


class ChatTemplates:
    """Writes conversations as transformers does, in a process with limits; leaving its context ends the process.

    Args:
        bounds: Limits of one conversation.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._process = BoundedProcess(_FUNCTION, bounds, imports=(_LIBRARY,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end()

    def text(self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return a conversation as ``tokenizer.apply_chat_template(…, tokenize=False)`` does.

        Args:
            tokenizer: A tokenizer of transformers.
            messages: The conversation.
            options: ``tools``, ``add_generation_prompt``, and what the template takes beside them.

        Raises:
            TemplateError: The template refuses the conversation, or writes what is no text.
            EndlessTemplateError: It takes too much time or memory.
        """
        if _has_own_method(tokenizer):  # it reads no template
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        tools = options.pop("tools", None) or None
        try:
            template = tokenizer.get_chat_template(None, tools)
            plain = [{key: value for key, value in each.items() if value is not None} for each in messages]
            text = self._process.call(template, plain, tools, {**tokenizer.special_tokens_map, **options})
        except UnboundedWorkError as error:
            raise EndlessTemplateError(f"the model's chat template {error}") from error
        except RefusedWorkError as error:
            raise TemplateError(shortened(one_line(str(error)), _SHOWN)) from error
        except ValueError as error:  # several templates, none of which is the usual one
            raise TemplateError(shortened(one_line(str(error)), _SHOWN)) from error
        return str(text)


def _has_own_method(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template


def render(
    template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
) -> str:
    """Write a conversation, in the process with limits.

    Raises:
        ValueError: What it writes is no text.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([messages], tools=tools, chat_template=template, **options)
    if len(text) > _LONGEST:
        raise ValueError(f"it writes {len(text)} characters, and at most {_LONGEST} are read")
    half = next((mark for mark in text if "\ud800" <= mark <= "\udfff"), "")
    if half:
        raise ValueError(f"it writes {half!a}, half of a character, which is no text")
    return str(text)
