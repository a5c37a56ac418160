"""Compare an output with the reference, the base and the merged model in one pass over the logits, each of which is read once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from slipway.proof.numerics import (
    Block,
    Ints,
    LogitComparer,
    Logits,
    StrengthMeter,
    adapter_strength,
    blocks,
    parts,
    perplexity_of,
)
from slipway.validation.comparisons import LogitComparison
from slipway_validate.judging.compare import compare_windows
from slipway_validate.judging.measures import Measure


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
