"""Topics of Python's documentation as conversations: a question, and the beginning of the topic as its answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipway.sample.corpus import topics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Conversation = list[dict[str, str]]

_SHORTEST, _LONGEST = 200, 1200
"""Characters of an answer; shorter topics are left out, longer ones cut."""
_UNLEARNED = -100
"""Label of a position that the loss leaves out."""


def conversations(*, heldout: int, seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """Return conversations to train on and conversations to judge by, shuffled by ``seed``.

    Raises:
        ModelExportError: ``FILE_ERROR``: this Python has no documentation.
    """
    found: list[Conversation] = []
    for topic, text in sorted(topics().items()):
        answer = " ".join(text.split())
        if len(answer) >= _SHORTEST:
            question = {"role": "user", "content": f"Explain the Python topic '{topic}'."}
            found.append([question, {"role": "assistant", "content": answer[:_LONGEST]}])
    random.Random(seed).shuffle(found)  # noqa: S311 - an order, not a secret
    return found[:-heldout], found[-heldout:]


def rendered(tokenizer: PreTrainedTokenizerBase, chosen: Sequence[Conversation]) -> list[str]:
    """Return conversations as the model's template writes them."""
    return [str(tokenizer.apply_chat_template(each, tokenize=False)) for each in chosen]


def samples(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, window: int) -> list[dict[str, Any]]:
    """Return texts as samples of one length, cut or padded; padding is not learned."""
    rows = []
    for text in texts:
        row = tokenizer(text, truncation=True, max_length=window, padding="max_length")
        ids, mask = row["input_ids"], row["attention_mask"]
        labels = [token if seen else _UNLEARNED for token, seen in zip(ids, mask, strict=True)]
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows
