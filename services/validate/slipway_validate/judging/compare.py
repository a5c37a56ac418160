"""Turn the results that runners wrote into the figures of the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipway.validation.comparisons import GreedyComparison, LogitComparison, ShapeCase
from slipway_validate.judging.measures import Measure
from slipway_validate.numerics import Logits, common_prefix
from slipway_validate.protocol.messages import LOGITS_FILE, Case, case_file, plain_file


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
    found: Logits = np.load(where.folder / case_file(case.name))
    to_reference = compare_windows(_plain(case, where.reference_folder, found)[None], found[None], where.measure)
    to_itself = compare_windows(_plain(case, where.folder, found)[None], found[None], where.measure)
    return ShapeCase(
        name=case.name,
        batch=len(case.rows),
        tokens=len(found),
        max_abs_diff=to_reference.max_abs_diff,
        mean_kl=to_reference.mean_kl,
        relative_error=to_reference.relative_error,
        self_max_abs_diff=to_itself.max_abs_diff,
        self_mean_kl=to_itself.mean_kl,
        self_relative_error=to_itself.relative_error,
    )


def _plain(case: Case, folder: Path, found: Logits) -> Logits:
    """Return the results of plain passes at a case's positions, in the order of the case's file.

    A row of the case may end before its plain pass: a decoder's results do not depend on later tokens.
    """
    if case.plain:
        alone: Logits = np.load(folder / plain_file(case.plain))
        return alone[: len(found)]
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
