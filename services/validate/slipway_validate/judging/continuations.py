"""Compare the long continuations of an output with the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from slipway.validation.answers import LongContinuation
from slipway_validate.judging.compare import load_logits
from slipway_validate.numerics import LogitComparer, common_prefix
from slipway_validate.protocol.messages import LongResult, long_file

GROUP = 4
"""Tokens of a group whose repetition is counted."""


def compare_long(
    theirs: LongResult | None,
    ours: LongResult | None,
    *,
    folders: tuple[Path, Path],
    decode: Callable[[Sequence[int]], str],
) -> LongContinuation | None:
    """Compare continuations of the same prompts; None if there are none.

    Args:
        theirs: The reference's.
        ours: The output's.
        folders: Folders of the reference's runner and of the output's.
        decode: Function from token ids to text.
    """
    if theirs is None or ours is None:
        return None
    if theirs.skipped or ours.skipped:
        return LongContinuation(skipped=ours.skipped or f"the reference has none: {theirs.skipped}")
    comparer = LogitComparer()
    for index in range(len(theirs.continuations)):
        comparer.add(*(load_logits(folder / long_file(index)) for folder in folders))
    found = comparer.result()
    pairs = list(zip(theirs.continuations, ours.continuations, strict=True))
    return LongContinuation(
        prompts=len(pairs),
        new_tokens=len(pairs[0][0]),
        same_tokens=sum(common_prefix(first, second) for first, second in pairs) / len(pairs),
        mean_kl=found.mean_kl,
        kl_by_position=found.kl_by_position,
        top1_agreement=found.top1_agreement,
        cache_kl=None if None in ours.cache_divergences else max(filter(None, ours.cache_divergences), default=0.0),
        repetition=_repetition([own for _, own in pairs]),
        reference_repetition=_repetition([other for other, _ in pairs]),
        example_reference=decode(pairs[0][0]),
        example_output=decode(pairs[0][1]),
    )


def _repetition(texts: Sequence[Sequence[int]]) -> float:
    """Return the share of groups of tokens that were already written before, over all texts."""
    groups = [[tuple(text[at : at + GROUP]) for at in range(len(text) - GROUP + 1)] for text in texts]
    count = sum(map(len, groups))
    return 1 - sum(len(set(each)) for each in groups) / count if count else 0.0
