"""The exact results of windows, computed once where they are small enough to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipway_quantize.calibration.streaming.crew import Crew
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.tuning.divergence import kept_form
from slipway_quantize.calibration.windows import Windows

_MOST_VALUES = 1 << 28
"""Most values that are kept in a file, 1 GiB."""


class References:
    """The exact results of the windows to fit to.

    All are computed in the same batches before they are used: an attempt that goes on in the middle gets the same bits.

    Args:
        models: The model, for each member of the crew.
        crew: Computes batches side by side.
        windows: The windows.
        at_once: Windows that a member computes at once.
        uses: How often a window is asked for, all together; less often than there are windows, nothing is kept.
        file: A new file for the results.
        distributions: As :func:`slipway_quantize.calibration.tuning.divergence.kept_form`.
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
        results = self._models[member].tuned_results(self._windows.batch(windows))
        return kept_form(results, distributions=self._distributions)
