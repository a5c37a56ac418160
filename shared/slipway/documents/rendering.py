"""Write documents in the form in which a model reads them, and cut them into passages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self

from slipway.documents.reader import Document, Purpose, invalid_text_error
from slipway.model.chat_templates import ChatTemplates, EndlessTemplateError, TemplateError

LENGTH = 4000
"""Characters of a passage of plain text: more than a window has, so that most windows begin within one."""
_LONGEST_CONVERSATION = 32_000
_SHORTEST = 16


class Writer(Protocol):
    """Writes documents as text."""

    def is_conversation(self, document: Document) -> bool:
        """Return whether a document is written as a conversation; a prompt and its completion may also be a plain text."""

    def text(self, document: Document) -> str:
        """Return the text of a document."""


class Contents:
    """Writes what conversations say, without a template: text that can be compared where no tokenizer is at hand."""

    def is_conversation(self, document: Document) -> bool:
        """Return whether a document has messages and nothing else."""
        return bool(document.messages) and not document.text

    def text(self, document: Document) -> str:
        """Return a text as it is, and the contents of messages line by line."""
        return document.text or "\n".join(_content_text(message.get("content")) for message in document.messages)


def _content_text(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


class Renderer:
    """Writes conversations by a model's chat template, and other documents as they are; leaving its context ends its process.

    Args:
        tokenizer: A tokenizer of transformers; None for a model without one.
        purpose: What the text is for, by which errors have their reason.
    """

    def __init__(self, tokenizer: Any, purpose: Purpose) -> None:
        self._tokenizer, self._purpose = tokenizer, purpose
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._templates = ChatTemplates()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._templates.__exit__()

    def is_conversation(self, document: Document) -> bool:
        """Return whether a document is a conversation for this model."""
        return bool(document.messages) and (self._has_template or not document.text)

    def text(self, document: Document) -> str:
        """Return the text of a document.

        Raises:
            ModelExportError: The template refuses the conversation, does not end, or there is none.
        """
        if not self.is_conversation(document):
            return document.text
        where = document.where
        if not self._has_template:
            remedy = "give the texts as the model saw them in training, or a chat template beside the tokenizer"
            raise self._error(f"{where} is a conversation, and the model has no chat template", remedy, where)
        try:
            return self._templates.text(self._tokenizer, document.messages)
        except EndlessTemplateError as error:
            raise self._error(f"{error} for {where}", "repair the chat template, or give plain texts", where) from error
        except TemplateError as error:
            remedy = "give conversations with the roles that the model's chat template takes"
            raise self._error(f"the chat template refuses {where} ({error})", remedy, where) from error

    def _error(self, what: str, remedy: str, where: str) -> Exception:
        return invalid_text_error(self._purpose, what, remedy, file=where)


def passages(documents: Iterable[Document], writer: Writer) -> dict[str, str]:
    """Return each passage once, with its document: a plain text is cut between its lines, a conversation is one passage.

    Raises:
        ModelExportError: As the writer.
    """
    sources: dict[str, str] = {}
    for document in documents:
        text = writer.text(document)
        pieces: Iterable[str] = (text[:_LONGEST_CONVERSATION],) if writer.is_conversation(document) else _cut(text)
        for piece in pieces:
            if len(piece.strip()) >= _SHORTEST:
                sources.setdefault(piece, document.where)
    return sources


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
