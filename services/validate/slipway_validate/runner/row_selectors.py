"""Which of a batch's results are compared, by family: those of padding are left out, and spans are brought to one width."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from slipway.models.families import SEQUENCE_CLASSIFIER, Comparison, Family
from slipway_validate.numerics import Ints, Logits

NOWHERE = np.float32(-1e30)
"""Logit of a place that a shorter row does not have: its probability is 0."""

Reading = Callable[[Logits, Ints], list[Logits]]
"""From a batch's results and mask (B, L) to the compared results of each row, (P, V)."""


def _of_tokens(results: Logits, mask: Ints) -> list[Logits]:
    """results: (B, L, V)."""
    return [row[real.astype(bool)] for row, real in zip(results, mask, strict=True)]


def _of_rows(results: Logits, mask: Ints) -> list[Logits]:  # noqa: ARG001 - a result is its whole row's
    """results: (B, P, V)."""
    return list(results)


def _of_spans(results: Logits, mask: Ints) -> list[Logits]:
    """results: (B, 2, L)."""
    return [row[:, real.astype(bool)] for row, real in zip(results, mask, strict=True)]


_BY_COMPARISON: Mapping[Comparison, Reading] = {Comparison.SPANS: _of_spans}


def reading_of(family: Family) -> Reading:
    """How the results of a family are read."""
    if family == SEQUENCE_CLASSIFIER:
        return _of_rows
    return _BY_COMPARISON.get(family.comparison, _of_tokens)


def per_token(family: Family) -> bool:
    """Whether each token has a result."""
    return reading_of(family) is _of_tokens


def joined(rows: list[Logits]) -> Logits:
    """The results of all rows below each other, the narrower ones filled up: (positions, V)."""
    width = max(row.shape[-1] for row in rows)
    filled = [np.pad(row, ((0, 0), (0, width - row.shape[-1])), constant_values=NOWHERE) for row in rows]
    found: Logits = np.concatenate(filled)
    return found
