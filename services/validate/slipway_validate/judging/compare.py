"""Turns the logits that runners wrote into the figures of the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipway.validation.findings import GreedyComparison, LogitComparison, ShapeCase
from slipway_validate.numerics import LogitComparer, Logits, common_prefix
from slipway_validate.protocol.messages import Case, case_file


def load_logits(path: Path) -> npt.NDArray[np.float32]:
    """Logits a runner wrote, mapped rather than read: (N, T, V)."""
    logits: npt.NDArray[np.float32] = np.load(path, mmap_mode="r")
    return logits


def compare_windows(other: npt.NDArray[np.float32], own: npt.NDArray[np.float32]) -> LogitComparison:
    """All windows of one model against another's. other, own: (N, T, V)."""
    comparer = LogitComparer()
    for theirs, ours in zip(other, own, strict=True):
        comparer.add(theirs, ours)
    return comparer.result()


@dataclass(frozen=True, slots=True)
class CaseLogits:
    """Where a case's logits are to be compared.

    Attributes:
        folder: The runner's folder, with the case's file.
        own: The output's own logits of plain passes, (N, T, V).
        reference: The reference's, (N, T, V).
    """

    folder: Path
    own: npt.NDArray[np.float32]
    reference: npt.NDArray[np.float32]


def compare_case(case: Case, where: CaseLogits, *, skipped: str = "") -> ShapeCase:
    """One shape case against the same positions of plain passes."""
    if skipped:
        return ShapeCase(name=case.name, batch=len(case.rows), skipped=skipped)
    found: Logits = np.load(where.folder / case_file(case.name))
    to_reference = compare_rows(_plain(case, where.reference), found)
    to_itself = compare_rows(_plain(case, where.own), found)
    return ShapeCase(
        name=case.name,
        batch=len(case.rows),
        tokens=case.positions,
        max_abs_diff=to_reference.max_abs_diff,
        mean_kl=to_reference.mean_kl,
        self_max_abs_diff=to_itself.max_abs_diff,
        self_mean_kl=to_itself.mean_kl,
    )


def compare_rows(other: Logits, own: Logits) -> LogitComparison:
    """Positions of one model against another's. other, own: (positions, V)."""
    comparer = LogitComparer()
    comparer.add(other, own)
    return comparer.result()


def _plain(case: Case, logits: npt.NDArray[np.float32]) -> Logits:
    """The plain passes' logits at a case's positions, in the order in which the case's file has them."""
    return np.concatenate([logits[row.window, : row.length] for row in case.rows])


def compare_greedy(reference: tuple[tuple[int, ...], ...], own: tuple[tuple[int, ...], ...]) -> GreedyComparison | None:
    """Continuations of the same prompts; None without prompts."""
    if not reference or not own:
        return None
    pairs = list(zip(reference, own, strict=True))
    return GreedyComparison(
        prompts=len(pairs),
        new_tokens=len(reference[0]),
        exact_match_share=sum(first == second for first, second in pairs) / len(pairs),
        mean_common_prefix=sum(common_prefix(first, second) for first, second in pairs) / len(pairs),
    )
