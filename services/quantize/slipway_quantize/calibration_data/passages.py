"""Cut documents into passages, in the form in which the model reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from slipway.documents.purposes import Purpose
from slipway.documents.reading import Document
from slipway.documents.rendering import Renderer

LENGTH = 4000
"""Characters of a passage of plain text: more than a window has, so that most windows begin within one."""
_LONGEST_CONVERSATION = 32_000
_SHORTEST = 16


def passages(documents: Iterable[Document], tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Yield passages with their documents: a plain text is cut between its lines, a conversation is written by the tokenizer's chat template.

    Raises:
        QuantizationError: ``CALIBRATION_DATA_INVALID``: the template refuses a conversation, or there is none.
    """
    with Renderer(tokenizer, Purpose.CALIBRATION) as renderer:
        for document in documents:
            text = renderer.text(document)
            found: Iterable[str] = (text[:_LONGEST_CONVERSATION],) if renderer.renders(document) else _cut(text)
            yield from ((document.where, passage) for passage in found if len(passage.strip()) >= _SHORTEST)


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
