"""Turn the results that runners wrote, long continuations among them, into the figures of the report.

An output is compared with the reference, the base and the merged model in one pass over the logits, each of which is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipway.proof.numerics import (
    Block,
    Ints,
    LogitComparer,
    Logits,
    StrengthMeter,
    adapter_strength,
    blocks,
    common_prefix,
    parts,
    perplexity_of,
)
from slipway.validation.answers import LongContinuation
from slipway.validation.comparisons import GreedyComparison, LogitComparison, ShapeCase
from slipway_validate.judging.distances import Measure
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


@dataclass(frozen=True, slots=True)
class OtherModels:
    """The models with which an output is compared, (N, P, V) each.

    Attributes:
        reference: The reference.
        base: The reference without its adapter; None without an adapter.
        merged: The merged model; None if it is the output itself, or no output of the export.
        labels: The token that each result predicts, (N, L); None if results predict no tokens.
    """

    reference: Logits
    base: Logits | None
    merged: Logits | None
    labels: Ints | None


def compare_together(
    own: Logits, others: OtherModels, measure: Measure, *, threads: int = 1
) -> dict[str, LogitComparison | float | None]:
    """Return the figures of an output by the names of :class:`slipway.validation.findings.OutputValidation`. own: (N, P, V).

    Windows are compared side by side by some threads; their number does not change the figures.
    """
    named = {"to_reference": others.reference, "to_merged": others.merged, "to_base": others.base}
    there = {name: logits for name, logits in named.items() if logits is not None}
    figures: dict[str, LogitComparison | float | None] = dict.fromkeys(named)
    if measure.comparer is not LogitComparer:
        figures |= {name: compare_windows(logits, own, measure) for name, logits in there.items()}
        if others.base is not None:
            figures["adapter_strength"] = adapter_strength(others.base, others.reference, own, centred=measure.logits)
        return figures
    compared = _Figures({name: LogitComparer() for name in there}, StrengthMeter(centred=measure.logits))
    with ThreadPoolExecutor(threads) as pool:
        for window in pool.map(
            lambda number: _compare_window(number, own, there, measure, labels=others.labels), range(len(own))
        ):
            compared.absorb(window)
    figures |= {name: comparer.result() for name, comparer in compared.comparers.items()}
    if others.base is not None:
        figures["adapter_strength"] = compared.strength.result()
    if others.labels is not None:
        figures["perplexity"] = perplexity_of(np.array(compared.losses))
    return figures


@dataclass(frozen=True, slots=True)
class _Figures:
    """The figures of some windows.

    Attributes:
        comparers: The comparisons with other models.
        strength: The adapter's strength.
        losses: The mean loss of each window.
    """

    comparers: dict[str, LogitComparer]
    strength: StrengthMeter
    losses: list[float] = field(default_factory=list)

    def absorb(self, other: _Figures) -> None:
        """Add the figures of the windows that follow."""
        for name, comparer in self.comparers.items():
            comparer.absorb(other.comparers[name])
        self.strength.absorb(other.strength)
        self.losses.extend(other.losses)


def _compare_window(
    number: int, own: Logits, others: dict[str, Logits], measure: Measure, *, labels: Ints | None
) -> _Figures:
    """Compare one window."""
    comparers, strength = {name: LogitComparer() for name in others}, StrengthMeter(centred=measure.logits)
    losses = []
    with np.errstate(invalid="ignore", over="ignore"):
        for rows in blocks(*own[number].shape):
            ours = Block(own[number][rows])
            theirs = {name: Block(logits[number][rows]) for name, logits in others.items()}
            for columns in parts(ours.logits.shape[1], len(ours.logits)):
                pieces, values = {name: block.part(columns) for name, block in theirs.items()}, ours.part(columns)[0]
                for name, comparer in comparers.items():
                    comparer.add_part(pieces[name], values)
                if "to_base" in pieces:
                    strength.add(pieces["to_base"][0], pieces["to_reference"][0], values)
            strength.end_block()
            for name, comparer in comparers.items():
                comparer.end_block(theirs[name], ours)
            if labels is not None:
                losses.append(ours.losses(labels[number][rows]))
    for comparer in comparers.values():
        comparer.end_window()
    return _Figures(comparers, strength, [float(np.concatenate(losses).mean())] if losses else [])
