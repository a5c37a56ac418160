"""Turn the results that runners wrote, long continuations among them, into the figures of the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipway.proof.numerics import LogitComparer, Logits, common_prefix
from slipway.validation.answers import LongContinuation
from slipway.validation.comparisons import GreedyComparison, LogitComparison, ShapeCase
from slipway_validate.judging.measures import Measure
from slipway_validate.protocol.messages import LOGITS_FILE, Case, LongResult, case_file, long_file, plain_file

GROUP = 4
"""Tokens of a group whose repetition is counted."""


def load_logits(path: Path) -> npt.NDArray[np.float32]:
    """Map the results of a runner into memory: (N, P, V)."""
    logits: npt.NDArray[np.float32] = np.load(path, mmap_mode="r")
    return logits


def compare_windows(other: npt.NDArray[np.float32], own: npt.NDArray[np.float32], measure: Measure) -> LogitComparison:
    """Compare all windows of one model with another's. other, own: (N, P, V)."""
    comparer = measure.comparer()
    for theirs, ours in zip(other, own, strict=True):
        comparer.add(theirs, ours)
    return comparer.result()


@dataclass(frozen=True, slots=True)
class CaseResults:
    """The places of a case's results, and how to compare them.

    Attributes:
        folder: The runner's folder, with the case's file.
        reference_folder: The folder of the reference's runner.
        measure: How to compare them.
    """

    folder: Path
    reference_folder: Path
    measure: Measure


def compare_case(case: Case, where: CaseResults, *, skipped: str = "") -> ShapeCase:
    """Compare one shape case with the same positions of plain passes."""
    if skipped:
        return ShapeCase(name=case.name, batch=len(case.rows), skipped=skipped)
    logits: Logits = np.load(where.folder / case_file(case.name))
    to_reference = compare_windows(_load_plain(case, where.reference_folder, logits)[None], logits[None], where.measure)
    to_itself = compare_windows(_load_plain(case, where.folder, logits)[None], logits[None], where.measure)
    return ShapeCase(
        name=case.name,
        batch=len(case.rows),
        tokens=len(logits),
        max_abs_diff=to_reference.max_abs_diff,
        mean_kl=to_reference.mean_kl,
        relative_error=to_reference.relative_error,
        self_max_abs_diff=to_itself.max_abs_diff,
        self_mean_kl=to_itself.mean_kl,
        self_relative_error=to_itself.relative_error,
    )


def _load_plain(case: Case, folder: Path, results: Logits) -> Logits:
    """Load the results of plain passes at a case's positions, in the order of the case's file.

    A row of the case may end before its plain pass: a decoder's results do not depend on later tokens.
    """
    if case.plain:
        alone: Logits = np.load(folder / plain_file(case.plain))
        return alone[: len(results)]
    logits = load_logits(folder / LOGITS_FILE)
    return np.concatenate([logits[row.window, : row.length] for row in case.rows])


def compare_greedy(reference: tuple[tuple[int, ...], ...], own: tuple[tuple[int, ...], ...]) -> GreedyComparison | None:
    """Compare continuations of the same prompts; None without prompts."""
    if not reference or not own:
        return None
    pairs = list(zip(reference, own, strict=True))
    return GreedyComparison(
        prompts=len(pairs),
        new_tokens=len(reference[0]),
        exact_match_share=sum(first == second for first, second in pairs) / len(pairs),
        mean_common_prefix=sum(common_prefix(first, second) for first, second in pairs) / len(pairs),
    )


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
    figures = comparer.result()
    pairs = list(zip(theirs.continuations, ours.continuations, strict=True))
    return LongContinuation(
        prompts=len(pairs),
        new_tokens=len(pairs[0][0]),
        same_tokens=sum(common_prefix(first, second) for first, second in pairs) / len(pairs),
        mean_kl=figures.mean_kl,
        kl_by_position=figures.kl_by_position,
        top1_agreement=figures.top1_agreement,
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
