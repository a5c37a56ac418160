"""The exact results of windows, computed once where they are small enough to keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.tuning.divergence import kept_form
from slipway_quantize.calibration.windows import Windows

_MOST_VALUES = 1 << 28
"""Most values that are kept in a file, 1 GiB."""


class References:
    """The exact results of the windows to fit to.

    All are computed in the same batches before they are used: an attempt that goes on in the middle gets the same bits.

    Args:
        model: The model.
        windows: The windows.
        at_once: Windows that are computed at once.
        uses: How often a window is asked for, all together; less often than there are windows, nothing is kept.
        file: A new file for the results.
        distributions: As :func:`slipway_quantize.calibration.tuning.divergence.kept_form`.
        on_window: Called before each batch.
    """

    def __init__(
        self,
        model: StreamedModel,
        windows: Windows,
        *,
        at_once: int,
        uses: int,
        file: Path,
        distributions: bool,
        on_window: Callable[[], None],
    ) -> None:
        self._distributions = distributions
        self._model = model
        self._windows = windows
        self._ends: list[int] = []
        self._kept: Tensor | None = None
        if uses > len(windows.fit):
            self._keep(at_once, file, on_window)

    @torch.no_grad()
    def _keep(self, at_once: int, file: Path, on_window: Callable[[], None]) -> None:
        fit = self._windows.fit
        for start in range(0, len(fit), at_once):
            on_window()
            group = list(fit[start : start + at_once])
            results = self._results(group)
            if self._kept is None:
                lengths = [len(window) + (self._windows.start is not None) for window in fit]
                if len(results) != sum(lengths[: len(group)]):
                    lengths = [1] * len(fit)
                if len(results) != sum(lengths[: len(group)]) or sum(lengths) * results.shape[1] > _MOST_VALUES:
                    return
                self._ends = [0, *np.cumsum(lengths).tolist()]
                shape = (self._ends[-1], results.shape[1])
                self._kept = torch.from_numpy(np.memmap(file, dtype=np.float32, mode="w+", shape=shape))
            self._kept[self._ends[start] : self._ends[start + len(group)]] = results

    @torch.no_grad()
    def of(self, chosen: list[int]) -> Tensor:
        """Return the results of some windows, as :func:`pass_back` takes them. (positions, values)."""
        if self._kept is None:
            return self._results([self._windows.fit[index] for index in chosen])
        return torch.cat([self._kept[self._ends[index] : self._ends[index + 1]] for index in chosen])

    def _results(self, windows: list[Tensor]) -> Tensor:
        return kept_form(self._model.tuned_results(self._windows.batch(windows)), distributions=self._distributions)
