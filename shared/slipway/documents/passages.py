"""Cut documents into passages, in the form in which the model reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slipway.documents.reading import Document
from slipway.documents.rendering import Writer

LENGTH = 4000
"""Characters of a passage of plain text: more than a window has, so that most windows begin within one."""
_LONGEST_CONVERSATION = 32_000
_SHORTEST = 16


def passages(documents: Iterable[Document], writer: Writer) -> dict[str, str]:
    """Return each passage once, with its document: a plain text is cut between its lines, a conversation is one passage.

    Raises:
        ModelExportError: As the writer.
    """
    found: dict[str, str] = {}
    for document in documents:
        text = writer.text(document)
        pieces: Iterable[str] = (text[:_LONGEST_CONVERSATION],) if writer.is_conversation(document) else _cut(text)
        for piece in pieces:
            if len(piece.strip()) >= _SHORTEST:
                found.setdefault(piece, document.where)
    return found


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
