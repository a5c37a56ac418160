"""The largest inputs of layers on text, for levels with one range for all inputs. Imports torch and transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipway.errors import QuantizationError
from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway_quantize.calibration.streaming.layers import Layer
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.windows import Batch, read_windows

WINDOWS, WINDOW_TOKENS = 64, 128
_AT_ONCE = 8
"""Windows that are computed together."""


def input_ranges(
    folder: ModelFolder, inputs: Mapping[str, Path], modules: Sequence[str], ctx: Context
) -> dict[str, float]:
    """Return the largest input of each layer on text. Weights stay in their files, results are not kept.

    Args:
        folder: The model, with its weights and tokenizer.
        inputs: Inputs of the stage; ``data`` has the text.
        modules: The linear layers.
        ctx: Context of the stage.

    Raises:
        QuantizationError: ``CALIBRATION_DATA_INVALID``, ``CALIBRATION_UNSUPPORTED``, ``NON_FINITE_OUTPUT``.
    """
    if "data" not in inputs:
        raise QuantizationError(
            "fp8_static needs text to find the ranges of activations, and there is none",
            reason="CALIBRATION_DATA_INVALID",
            remedy="give text as the input data, or use fp8, which needs none",
        )
    model = StreamedModel(folder, group_size=1, head=True)
    windows = read_windows(
        inputs["data"],
        folder,
        count=WINDOWS,
        length=min(WINDOW_TOKENS, _most_tokens(model)),
        vocabulary=model.vocabulary,
        seed=0,
    )
    seen = [*windows.held_out, *windows.fit]
    watch = _Largest()
    for layer in model.layers.values():
        layer.observe = watch
    with torch.no_grad():
        for start in range(0, len(seen), _AT_ONCE):
            ctx.progress("ranges", done=start, total=len(seen), unit="windows")
            watch.batch = windows.batch(list(seen[start : start + _AT_ONCE]))
            model.outputs(watch.batch)
    ctx.record(windows=len(seen), data_sha256=windows.digest)
    return {module: _require_range(watch.found, module) for module in modules}


def _most_tokens(model: StreamedModel) -> int:
    most = getattr(model.model.config, "max_position_embeddings", None)
    return max(1, most - 2) if isinstance(most, int) else WINDOW_TOKENS  # some tables of positions begin at 2


class _Largest:
    """Remembers the largest input of each layer at positions with text."""

    batch: Batch

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def __call__(self, layer: Layer, inputs: Tensor) -> None:
        mask = self.batch.mask
        values = inputs[mask == 1] if inputs.shape[:-1] == mask.shape else inputs
        largest = float(values.abs().max())
        if not math.isfinite(largest):
            raise QuantizationError(
                f"an input of {layer.name} is NaN or infinite on the calibration text",
                reason="NON_FINITE_OUTPUT",
                remedy="the training diverged or the file is damaged: use an earlier checkpoint",
                about={"tensor": layer.name},
            )
        self.found[layer.name] = max(self.found.get(layer.name, 0.0), largest)


def _require_range(ranges: Mapping[str, float], module: str) -> float:
    if f"{module}.weight" not in ranges:
        raise QuantizationError(
            f"text does not reach the layer {module}, so the range of its input is unknown",
            reason="CALIBRATION_UNSUPPORTED",
            remedy="name it in keep, or use level fp8, which needs no text",
            about={"module": module},
        )
    return ranges[f"{module}.weight"]
