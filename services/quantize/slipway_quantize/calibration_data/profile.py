"""Describe the chosen text: lengths, scripts, and the share of the vocabulary that it has."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

_MOST_SCRIPTS = 8


def profile(passages: Sequence[str], tokens: Sequence[Sequence[int]], *, vocabulary: int) -> dict[str, Any]:
    """Return figures of the passages and their tokens, as JSON-ready data."""
    lengths = sorted(map(len, tokens))
    seen = {token for each in tokens for token in each}
    return {
        "passages": len(passages),
        "tokens": sum(lengths),
        "characters": sum(map(len, passages)),
        "passage_tokens": {"shortest": lengths[0], "median": median(lengths), "longest": lengths[-1]},
        "scripts": scripts(passages),
        "vocabulary": {"size": vocabulary, "seen": len(seen), "coverage": round(len(seen) / max(vocabulary, 1), 6)},
    }


def scripts(passages: Sequence[str]) -> dict[str, float]:
    """Return the share of letters in each script, such as LATIN, CYRILLIC or CJK, the most frequent first."""
    letters: Counter[str] = Counter()
    for passage in passages:
        letters.update(passage)
    found: Counter[str] = Counter()
    for letter, count in letters.items():
        if letter.isalpha():
            found[unicodedata.name(letter, "UNKNOWN").split()[0]] += count
    total = max(found.total(), 1)
    ordered = sorted(found.items(), key=lambda entry: (-entry[1], entry[0]))
    return {name: round(count / total, 4) for name, count in ordered[:_MOST_SCRIPTS]}
