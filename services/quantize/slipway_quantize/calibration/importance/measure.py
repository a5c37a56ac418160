"""Measure the mean square of each input of each linear layer on text: what llama.cpp calls an importance matrix."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipway.errors import QuantizationError
from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway_quantize.calibration.params import ImportanceParams
from slipway_quantize.calibration.streaming.experts import report_unreached
from slipway_quantize.calibration.streaming.layers import Layer
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.streaming.moments import Observer, Reached
from slipway_quantize.calibration.windows import read_windows

FILE, DESCRIPTION = "importance.safetensors", "importance.json"
_AT_ONCE = 4
_NARROWEST = 16
"""Layers with an odd number of inputs have no blocks to round, and need no importance."""


class _Squares(Observer):
    """Sums of the squares of each input."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self.sums: dict[str, Tensor] = {}
        self.positions: dict[str, int] = {}

    def _note(self, layer: Layer, inputs: Tensor) -> None:
        rows = self._inputs(inputs)
        squares = rows.square().sum(0, dtype=torch.float64)
        self.sums[layer.name] = self.sums[layer.name] + squares if layer.name in self.sums else squares
        self.positions[layer.name] = self.positions.get(layer.name, 0) + len(rows)


@torch.no_grad()
def measure_importance(source: Path, data: Path, target: Path, *, params: ImportanceParams, ctx: Context) -> None:
    """Write ``importance.safetensors``, with a vector for each weight under its name, and ``importance.json`` into ``target``.

    Args:
        source: The model's folder.
        data: The text's folder.
        target: An empty folder.
        params: Parameters.
        ctx: Progress and cancellation.

    Raises:
        QuantizationError: ``CALIBRATION_UNSUPPORTED``, ``CALIBRATION_DATA_INVALID``, ``NON_FINITE_OUTPUT``, and the reasons of reading a model.
    """
    torch.set_num_threads(params.threads)
    folder = ModelFolder.open(source)
    model = StreamedModel(folder, group_size=_NARROWEST, head=True)
    windows = read_windows(
        data,
        folder,
        count=params.windows,
        length=params.window_tokens,
        vocabulary=model.vocabulary,
        seed=params.seed,
        start=model.start,
    )
    chosen = [*windows.fit, *windows.held_out]
    squares = _Squares(model.layers)
    with squares.watch(list(model.layers.values())):
        for first in range(0, len(chosen), _AT_ONCE):
            ctx.progress("text", done=first, total=len(chosen), unit="windows")
            batch = windows.batch(chosen[first : first + _AT_ONCE])
            squares.begin(batch.masks)
            with suppress(Reached):
                model.outputs(batch)
    means = {name: (total / squares.positions[name]).float() for name, total in squares.sums.items()}
    wrong = next((name for name, mean in means.items() if not bool(torch.isfinite(mean).all())), "")
    if wrong:
        raise QuantizationError(
            f"the inputs of {wrong!r} are NaN or infinite on the calibration text",
            reason="NON_FINITE_OUTPUT",
            remedy="check the model: it computes no numbers on this text",
            about={"tensor": wrong},
        )
    save_file({model.renamed.get(name, name): mean for name, mean in means.items()}, target / FILE)
    (target / FILE).chmod(0o644)
    facts = {"weights": len(means), "windows": len(chosen), "text": windows.digest, "seed": params.seed}
    facts |= report_unreached(model.experts, means, "the importance of their inputs is unknown", ctx)
    (target / DESCRIPTION).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    ctx.record(**facts)
