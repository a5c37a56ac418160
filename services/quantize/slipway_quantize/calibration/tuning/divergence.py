"""Measure how far a model's results are from another's, also as a loss; compute exact results once if they are small enough to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipway.model.families import Comparison, Family
from slipway_quantize.calibration.streaming.crew import Crew
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.windows import Windows

_MULTIPLE = ("regression", "multi_label_classification")

_MOST_VALUES = 1 << 28
"""Most values that are kept in a file, 1 GiB."""


def compares_distributions(family: Family, config: Any) -> bool:
    """Return whether a family's results are distributions; otherwise they are compared as numbers."""
    if family.comparison is Comparison.EMBEDDINGS:
        return False
    numbers = getattr(config, "problem_type", None) in _MULTIPLE or getattr(config, "num_labels", 2) == 1
    return not (family.comparison is Comparison.CLASSES and numbers)


def divergence(reference: Tensor, other: Tensor, *, distributions: bool) -> Tensor:
    """Return the sum over positions of the Kullback–Leibler divergence in nats, or of the relative squared error.

    Args:
        reference: (positions, values)
        other: (positions, values)
        distributions: Whether values are logits.
    """
    if distributions:
        return torch.nn.functional.kl_div(
            other.log_softmax(-1), reference.log_softmax(-1), reduction="sum", log_target=True
        )
    energy = reference.square().sum(-1).clamp_min(1e-12)
    return ((other - reference).square().sum(-1) / energy).sum()


def reference_form(reference: Tensor, *, distributions: bool) -> Tensor:
    """Return the form of exact results that :func:`pass_back` takes: probabilities, or the results themselves."""
    return reference.softmax(-1) if distributions else reference


def pass_back(reference: Tensor, other: Tensor, *, distributions: bool) -> None:
    """Compute the gradients of the divergence; that of the Kullback–Leibler divergence is the difference of the probabilities.

    Args:
        reference: As :func:`reference_form` returns it. (positions, values)
        other: (positions, values)
        distributions: Whether values are logits.
    """
    if distributions:
        other.backward(other.detach().softmax(-1).sub_(reference))
    else:
        divergence(reference, other, distributions=False).backward()


def draw_gradients(results: Tensor, *, distributions: bool, draw: torch.Generator) -> Tensor:
    """Draw gradients of the divergence at the results, whose mean product is its second derivative: the Fisher information.

    For distributions they are those of the likelihood of tokens that are drawn from the results themselves.

    Args:
        results: (positions, values)
        distributions: Whether values are logits.
        draw: Draws tokens, or directions.
    """
    exact = results.detach()
    if not distributions:
        energy = exact.square().sum(-1, keepdim=True).clamp_min(1e-12)
        return torch.randn(exact.shape, generator=draw) * (2 / energy).sqrt()
    probabilities = exact.softmax(-1)
    drawn = torch.multinomial(probabilities, 1, generator=draw)
    return probabilities.scatter_add_(1, drawn, torch.full_like(probabilities[:, :1], -1))


class References:
    """The exact results of the windows to fit to.

    All are computed in the same batches before they are used, so that a resumed attempt gets the same bits.

    Args:
        models: The model, for each member of the crew.
        crew: Computes batches side by side.
        windows: The windows.
        at_once: Windows that a member computes at once.
        uses: How many windows are asked for in total; results are kept only if that is more than there are.
        file: A new file for the results.
        distributions: As :func:`slipway_quantize.calibration.tuning.divergence.reference_form`.
        on_window: Called before each batch.
    """

    def __init__(
        self,
        models: Sequence[StreamedModel],
        windows: Windows,
        *,
        crew: Crew,
        at_once: int,
        uses: int,
        file: Path,
        distributions: bool,
        on_window: Callable[[], None],
    ) -> None:
        self._distributions = distributions
        self._models = models
        self._windows = windows
        self._ends: list[int] = []
        self._kept: Tensor | None = None
        if uses > len(windows.fit):
            self._keep(crew, at_once, file, on_window)

    def _keep(self, crew: Crew, at_once: int, file: Path, on_window: Callable[[], None]) -> None:
        fit = self._windows.fit
        starts = range(0, len(fit), at_once)
        first = self._results(0, list(fit[:at_once]))
        lengths = [len(window) + (self._windows.start is not None) for window in fit]
        if len(first) != sum(lengths[:at_once]):
            lengths = [1] * len(fit)
        if len(first) != sum(lengths[:at_once]) or sum(lengths) * first.shape[1] > _MOST_VALUES:
            return
        ends = [0, *np.cumsum(lengths).tolist()]
        kept = torch.from_numpy(np.memmap(file, dtype=np.float32, mode="w+", shape=(ends[-1], first.shape[1])))
        kept[: len(first)] = first

        def keep(member: int, start: int) -> None:
            on_window()
            group = list(fit[start : start + at_once])
            kept[ends[start] : ends[start + len(group)]] = self._results(member, group)

        crew.map(keep, starts[1:])
        self._kept, self._ends = kept, ends

    def of(self, member: int, chosen: list[int]) -> Tensor:
        """Return the results of some windows, as :func:`pass_back` takes them. (positions, values)."""
        if self._kept is None:
            return self._results(member, [self._windows.fit[index] for index in chosen])
        return torch.cat([self._kept[self._ends[index] : self._ends[index + 1]] for index in chosen])

    @torch.no_grad()
    def _results(self, member: int, windows: list[Tensor]) -> Tensor:
        results = self._models[member].tuning_results(self._windows.batch(windows))
        return reference_form(results, distributions=self._distributions)
