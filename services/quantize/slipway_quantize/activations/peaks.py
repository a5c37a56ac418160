"""Find the largest magnitude that each module of a transformers model reads or returns on text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.windows import read_windows

_WINDOW_TOKENS = 128


def module_peaks(
    folder: ModelFolder, data: Path, *, seed: int, windows: int, ctx: Context
) -> tuple[dict[str, float], str, int]:
    """Return the largest magnitudes of each module's results and inputs in the model's order, the text's digest, and the number of windows.

    Weights stay in their files, and the model computes in float32.

    Raises:
        QuantizationError: ``CALIBRATION_UNSUPPORTED``, ``CALIBRATION_DATA_INVALID``.
    """
    model = StreamedModel(folder, group_size=1, head=False)
    text = read_windows(data, folder, count=windows, length=_WINDOW_TOKENS, vocabulary=model.vocabulary, seed=seed)
    peaks: dict[str, float] = {}
    hooks = [module.register_forward_hook(_note(peaks, name)) for name, module in model.model.named_modules()]
    every = [*text.held_out, *text.fit]
    try:
        with torch.no_grad():
            for number, window in enumerate(every):
                ctx.progress("ranges", done=number, total=len(every), unit="windows")
                model.outputs(text.batch([window]))
    finally:
        for hook in hooks:
            hook.remove()
    return peaks, text.digest, len(every)


def _note(peaks: dict[str, float], name: str) -> Callable[[Any, Any, Any], None]:
    def hook(module: Any, args: Any, result: Any) -> None:
        del module
        for where, given in ((name, result), (f"{name} (input)", args)):
            for values in _floats(given):
                largest = float(values.abs().max())
                peaks[where] = max(peaks.get(where, 0.0), float("inf") if math.isnan(largest) else largest)

    return hook


def _floats(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        if result.is_floating_point() and result.numel():
            yield result
    elif isinstance(result, tuple | list):
        for each in result:
            yield from _floats(each)
    elif isinstance(result, dict):
        for each in result.values():
            yield from _floats(each)
