"""Select the results of a batch to compare, by family: without padding, and spans with one width."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipway.model.families import SEQUENCE_CLASSIFIER, Comparison, Family
from slipway_validate.numerics import Ints, Logits

NOWHERE = np.float32(-1e30)
"""Logit of a position that a shorter row lacks: its probability is 0."""

RowSelector = Callable[[Logits, Ints], list[Logits]]
"""Function from a batch's results and mask (B, L) to the compared results of each row, (P, V)."""


def _of_tokens(results: Logits, mask: Ints) -> list[Logits]:
    """Select the results of tokens. results: (B, L, V)."""
    return [row[real.astype(bool)] for row, real in zip(results, mask, strict=True)]


def _of_rows(results: Logits, mask: Ints) -> list[Logits]:  # noqa: ARG001 - a result is its whole row's
    """Select all results of each row. results: (B, P, V)."""
    return list(results)


def _of_spans(results: Logits, mask: Ints) -> list[Logits]:
    """Select the starts and ends of spans at tokens. results: (B, 2, L)."""
    return [row[:, real.astype(bool)] for row, real in zip(results, mask, strict=True)]


def choose_row_selector(family: Family) -> RowSelector:
    """Choose the selector of results for a family."""
    if family == SEQUENCE_CLASSIFIER:
        return _of_rows
    return _of_spans if family.comparison is Comparison.SPANS else _of_tokens


def per_token(family: Family) -> bool:
    """Return whether each token has a result."""
    return choose_row_selector(family) is _of_tokens


def join_rows(rows: list[Logits]) -> Logits:
    """Stack the results of all rows, with narrower ones filled up: (positions, V)."""
    width = max(row.shape[-1] for row in rows)
    filled = [np.pad(row, ((0, 0), (0, width - row.shape[-1])), constant_values=NOWHERE) for row in rows]
    found: Logits = np.concatenate(filled)
    return found
