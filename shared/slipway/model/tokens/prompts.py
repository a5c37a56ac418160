"""Read the texts that a sentence encoder puts before questions and passages: its prompts.

Source of what they do: sentence-transformers 6.2, ``SentenceTransformer.encode_query``, ``encode_document`` and ``_resolve_prompt``. A prompt is joined
with the text before it is split into tokens. A method without a prompt of its own name puts none; ``encode`` puts the default one, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipway.files.json_documents import read_json_object
from slipway.model.sentences import SENTENCE_SETTINGS

_QUERY = "query"
_PASSAGES = ("document", "passage", "corpus")
_MOST, _LONGEST_NAME, _LONGEST = 200, 100, 1000


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a sentence encoder.

    Attributes:
        texts: Prompts by name, without empty ones.
        default: Name of the prompt that every text gets, unless a method or its caller names another; empty for none.
    """

    texts: Mapping[str, str]
    default: str = ""

    @property
    def differ(self) -> bool:
        """Whether questions and passages get prompts of their own."""
        return _QUERY in self.texts or bool(self.passage_name)

    @property
    def passage_name(self) -> str:
        """Name of the prompt of passages; empty for none."""
        return next((name for name in _PASSAGES if name in self.texts), "")

    @property
    def question(self) -> str:
        """What comes before a question."""
        return self.texts.get(_QUERY if self.differ else self.default, "")

    @property
    def passage(self) -> str:
        """What comes before a passage."""
        return self.texts.get(self.passage_name if self.differ else self.default, "")


def read_prompts(folder: Path) -> Prompts:
    """Return the prompts that the settings of sentence-transformers name; none where they cannot be read.

    What is no text, or longer than any prompt is, is left out.
    """
    try:
        settings = read_json_object(folder / SENTENCE_SETTINGS, lenient=True)
    except (OSError, ValueError):
        return Prompts({})
    listed, default = settings.get("prompts"), settings.get("default_prompt_name")
    texts = {
        name: text
        for name, text in (listed if isinstance(listed, dict) else {}).items()
        if isinstance(text, str) and 0 < len(text) <= _LONGEST and 0 < len(name) <= _LONGEST_NAME
    }
    kept = dict(list(texts.items())[:_MOST])
    return Prompts(kept, default if isinstance(default, str) and default in kept else "")
