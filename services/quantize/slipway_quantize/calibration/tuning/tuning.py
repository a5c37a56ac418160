"""Tune codes and scales of all layers at once by gradients of the divergence of the model's results.

The places of weights on the grid move by Adam, and are rounded in each step (straight-through gradients). Everything that grows with
the model lies in mapped files: weights, places, their gradients and moments.

A tied embedding has the head's codes, and the head's own inputs say nothing about its errors, so their effect on the results is
measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipway_quantize.calibration.rounding.grid import Fixed, Piece, Share, Tuned
from slipway_quantize.calibration.rounding.methods import Rounded
from slipway_quantize.calibration.streaming.crew import Crew
from slipway_quantize.calibration.streaming.layers import Layer, multiply
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.tuning.divergence import References, draw_gradients, pass_back
from slipway_quantize.calibration.windows import Batch, Windows

_BETAS = 0.9, 0.95
_SMALLEST = 1e-20
_FLOOR = 0.3
"""Added to the divisor of steps, as a share of the weight's first gradients (root mean square): places with small ones, mostly noise, move less."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Sizes of the tuning.

    Attributes:
        steps: Number of steps.
        windows: Windows of a step.
        at_once: Windows that a member of the crew computes at once.
        rate: Largest step of a place, in codes.
        scale_rate: Largest relative step of a scale.
        seed: Seed of the order of windows.
    """

    steps: int
    windows: int
    at_once: int
    rate: float
    scale_rate: float
    seed: int

    def factor(self, step: int) -> float:
        """Return the share of the rates in a step: half a wave of the cosine."""
        return 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def choose_windows(self, count: int) -> Iterator[list[int]]:
        """Yield the windows of each step: all of them in a new order, again and again."""
        random = np.random.default_rng(self.seed)
        waiting: list[int] = []
        for _ in range(self.steps):
            while len(waiting) < self.windows:
                waiting += [int(index) for index in random.permutation(count)]
            yield waiting[: self.windows]
            waiting = waiting[self.windows :]


class Tuning:
    """Tunes the rounded weights of a model.

    Args:
        models: The model, for each member of the crew.
        crew: Computes windows side by side.
        start: Rounded weights to start from, by layer.
        windows: Windows to fit to.
        schedule: Steps and rates.
        folder: Receives the mapped files.
        distributions: As :func:`slipway_quantize.calibration.tuning.divergence.divergence`.

    Attributes:
        weights: The weights that are tuned, by layer.
    """

    def __init__(
        self,
        models: Sequence[StreamedModel],
        start: Mapping[str, Rounded],
        windows: Windows,
        *,
        crew: Crew,
        schedule: Schedule,
        folder: Path,
        distributions: bool,
    ) -> None:
        self._models = models
        self._crew = crew
        self._windows = windows
        self._schedule = schedule
        self._folder = folder
        self._distributions = distributions
        self._made = 0
        self._start = start
        self.weights = {name: self._make_tuned(models[0].layers[name], rounded) for name, rounded in start.items()}
        shares = [{name: weight.of(member) for name, weight in self.weights.items()} for member in range(crew.count)]
        self._shares: list[dict[str, Share]] = shares
        self._pieces = [piece for weight in self.weights.values() for piece in weight.pieces]
        self._optimizers = [self._optimizer(piece) for piece in self._pieces]

    def _optimizer(self, piece: Piece) -> torch.optim.Optimizer:
        """Return the optimizer that moves a piece; its arrays are mapped files."""
        rates = (piece.places, self._schedule.rate), (piece.factors, self._schedule.scale_rate)
        groups = [{"params": [values], "most": rate} for values, rate in rates]
        optimizer = torch.optim.Adam(groups, betas=_BETAS, eps=_SMALLEST, fused=True)
        for values, _ in rates:
            shape = tuple(values.shape)
            optimizer.state[values] = {
                "step": torch.zeros(()),
                "exp_avg": self._zeros(shape),
                "exp_avg_sq": self._zeros(shape),
            }
        return optimizer

    def _make_tuned(self, layer: Layer, rounded: Rounded) -> Tuned:
        pieces = []
        for rows in layer.pieces:
            places = rounded.places_of(layer, rows)
            kept = self._zeros(tuple(places.shape)).copy_(places)
            fitted = rounded.weight.fitted.rows(rows)
            pieces.append(Piece(rounded.weight.grid, fitted, kept, self._zeros, self._crew.count))
        return Tuned(pieces)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros in a mapped file."""
        self._made += 1
        path = self._folder / f"array-{self._made}"
        array = np.memmap(path, dtype=np.float32, mode="w+", shape=shape)
        return torch.from_numpy(array)

    def run(
        self, *, first: int = 0, on_step: Callable[[int], None], on_window: Callable[[], None] = lambda: None
    ) -> None:
        """Do all steps from ``first`` on; call ``on_step`` with the number of steps done after each."""
        count, at_once = len(self._windows.fit), self._schedule.at_once * self._crew.count
        references = References(
            self._models,
            self._windows,
            crew=self._crew,
            at_once=self._schedule.at_once,
            uses=self._schedule.steps * self._schedule.windows,
            file=self._folder / "references",
            distributions=self._distributions,
            on_window=on_window,
        )
        for step, chosen in enumerate(self._schedule.choose_windows(count)):
            if step < first:
                continue
            for start in range(0, len(chosen), at_once):
                on_window()
                group = chosen[start : start + at_once]
                self._crew.run(partial(self._pass_back, references, group))
            self._move(step)
            on_step(step + 1)

    def _pass_back(self, references: References, group: list[int], member: int) -> None:
        """Add the gradients of a member's share of the windows to its arrays."""
        if not (chosen := group[member :: self._crew.count]):
            return
        exact = references.of(member, chosen)
        batch = self._windows.batch([self._windows.fit[index] for index in chosen])
        model = self._models[member]
        with model.use_rounded(self._shares[member]):
            pass_back(exact, model.tuning_results(batch), distributions=self._distributions)

    def _move(self, step: int) -> None:
        """Move all pieces: each in one thread, because the small arrays of a small model gain nothing from several."""
        self._crew.map(partial(self._move_piece, step), range(len(self._pieces)))

    def _move_piece(self, step: int, _: int, place: int) -> None:
        piece, optimizer = self._pieces[place], self._optimizers[place]
        piece.divide()
        for group in optimizer.param_groups:
            if step == 0:
                (values,) = group["params"]
                group["eps"] = max(_SMALLEST, _FLOOR * float(values.grad.square().mean().sqrt()))
            group["lr"] = group["most"] * self._schedule.factor(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        piece.update()

    def to_fixed(self) -> dict[str, Fixed]:
        """Return the weights as they are now."""
        starts = {name: rounded.weight for name, rounded in self._start.items()}
        return {name: tuned.to_fixed(starts[name].fitted, starts[name].grid) for name, tuned in self.weights.items()}

    def state(self) -> dict[str, Tensor]:
        """Return all that another attempt needs to go on from here."""
        floors = torch.tensor([group["eps"] for group, _ in self._optimizer_groups()], dtype=torch.float64)
        return {"floors": floors} | {
            f"{index}.{part}": kept
            for index, (_, arrays) in enumerate(self._optimizer_groups())
            for part, kept in arrays.items()
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        for index, (group, arrays) in enumerate(self._optimizer_groups()):
            group["eps"] = float(state["floors"][index])
            for part, kept in arrays.items():
                kept.copy_(state[f"{index}.{part}"])
        self._crew.map(lambda _, piece: piece.update(), self._pieces)

    def _optimizer_groups(self) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
        """Yield the groups of all optimizers, each with the arrays that steps change."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                (values,) = group["params"]
                yield group, {"values": values.detach(), **optimizer.state[values]}


def embedding_moments(
    models: Sequence[StreamedModel], batches: Sequence[Batch], *, crew: Crew, seed: int, on_batch: Callable[[], None]
) -> Tensor:
    """Measure how rounding errors of a tied embedding change results.

    Returns the matrix (K, K) to add to the second moments of the head's inputs at one position, so that they weigh the embedding's errors too.

    To second order, errors of weights add half of their Fisher information to the divergence. For an embedding that is the mean product of
    the gradients of its rows, for tokens drawn from the model's own results; for the head it is the mean product of its inputs times the variance
    of these draws. Both are summed over tokens here, because each token is looked up as often as it is the result.

    Args:
        models: The model, for each member of the crew; its embedding is tied to its head.
        batches: Windows to compute.
        crew: Computes batches side by side.
        seed: Seed of the tokens that are drawn.
        on_batch: Called before each batch.
    """
    width = models[0].model.get_input_embeddings().weight.shape[1]

    def measure(member: int) -> tuple[Tensor, float]:
        moments, variance = torch.zeros(width, width), 0.0
        for number in crew.share(member, range(len(batches))):
            on_batch()
            sums = _measure(models[member], batches[number], torch.Generator().manual_seed(seed + number))
            moments += sums[0]
            variance += sums[1]
        return moments, variance

    for model in models:
        model.save_memory()
    try:
        parts = crew.run(measure)
    finally:
        for model in models:
            model.save_memory(on=False)
    total = torch.stack([moments for moments, _ in parts]).sum(0)
    return total / max(sum(variance for _, variance in parts), 1e-30)


def _measure(model: StreamedModel, batch: Batch, draw: torch.Generator) -> tuple[Tensor, float]:
    """Return the sums of a batch: of the products of the rows' gradients (K, K), and of the draws' variances."""
    rows: list[Tensor] = []
    with model.record_rows(rows):
        results = model.outputs(batch)
    (table,) = rows
    variance = float((1 - results.detach().softmax(-1).square().sum(-1)).sum(dtype=torch.float64))
    if not math.isfinite(variance):  # the pass over the blocks says where it begins
        return torch.zeros(table.shape[1], table.shape[1]), 0.0
    results.backward(draw_gradients(results, distributions=True, draw=draw))
    assert table.grad is not None
    columns = table.grad.T.contiguous()  # (K, rows)
    return multiply(columns, columns), variance
