"""Cut documents into passages, in the form in which the model reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from slipway.models.chat_templates import ChatTemplates, EndlessTemplateError, TemplateError
from slipway_quantize.calibration_data.documents import Document, invalid

LENGTH = 4000
"""Characters of a passage of plain text: more than a window has, so that most windows begin within one."""
_LONGEST_CONVERSATION = 32_000
_SHORTEST = 16


def passages(documents: Iterable[Document], tokenizer: Any) -> Iterator[str]:
    """Yield passages: a plain text is cut between its lines, a conversation is written by the tokenizer's chat template.

    Raises:
        QuantizationError: ``CALIBRATION_DATA_INVALID``: the template refuses a conversation, or there is none.
    """
    with ChatTemplates() as templates:
        for document in documents:
            if document.messages and (tokenizer.chat_template or not document.text):
                found: Iterable[str] = (_rendered(document, tokenizer, templates)[:_LONGEST_CONVERSATION],)
            else:
                found = _cut(document.text)
            yield from (passage for passage in found if len(passage.strip()) >= _SHORTEST)


def _rendered(document: Document, tokenizer: Any, templates: ChatTemplates) -> str:
    if not tokenizer.chat_template:
        remedy = "give the texts as the model saw them in training, or a chat template beside the tokenizer"
        raise invalid(f"{document.where} is a conversation, and the model has no chat template", remedy)
    try:
        return templates.text(tokenizer, document.messages)
    except EndlessTemplateError as error:
        remedy = "repair the chat template, or give plain texts"
        raise invalid(f"{error} for {document.where}", remedy, file=document.where) from error
    except TemplateError as error:
        remedy = "give conversations with the roles that the model's chat template takes"
        raise invalid(f"the chat template refuses {document.where} ({error})", remedy, file=document.where) from error


def _cut(text: str) -> Iterator[str]:
    """Yield pieces of at most LENGTH characters, cut behind the last paragraph or line of each if it has one."""
    start = 0
    while start < len(text):
        end = min(start + LENGTH, len(text))
        if end < len(text):
            least = start + LENGTH // 2
            places = (text.rfind("\n\n", least, end) + 2, text.rfind("\n", least, end) + 1)
            end = next((place for place in places if place > least), end)
        yield text[start:end]
        start = end
