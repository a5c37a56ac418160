"""Tune codes and scales of all layers at once by gradients of the divergence of the model's results.

The places of weights on the grid move by Adam, and are rounded in each step (straight-through gradients). Everything that grows with
the model lies in mapped files: weights, places, their gradients and moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipway_quantize.calibration.rounding.roundings import Tuned
from slipway_quantize.calibration.rounding.rounds import Rounded
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.tuning.divergence import divergence
from slipway_quantize.calibration.tuning.references import References
from slipway_quantize.calibration.windows import Windows

_BETAS = 0.9, 0.95
_SMALLEST = 1e-20


@dataclass(frozen=True, slots=True)
class Schedule:
    """Sizes of the tuning.

    Attributes:
        steps: Number of steps.
        windows: Windows of a step.
        at_once: Windows that are computed at once.
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

    def chosen(self, count: int) -> Iterator[list[int]]:
        """Yield the windows of each step: all of them in a new order, again and again."""
        random = np.random.default_rng(self.seed)
        waiting: list[int] = []
        for _ in range(self.steps):
            while len(waiting) < self.windows:
                waiting += [int(index) for index in random.permutation(count)]
            yield waiting[: self.windows]
            waiting = waiting[self.windows :]


class Moved:
    """Values that Adam moves, with their gradients and moments.

    Args:
        values: The values.
        rate: Largest step.
        like: Makes an array of zeros of a shape.
    """

    def __init__(self, values: Tensor, rate: float, like: Callable[[tuple[int, ...]], Tensor]) -> None:
        self.values = values
        self._rate = rate
        shape = tuple(values.shape)
        self.first, self.second = like(shape), like(shape)
        values.grad = like(shape)

    @torch.no_grad()
    def step(self, number: int, factor: float) -> None:
        """Move the values; the first step has number 1."""
        gradient = self.values.grad
        assert gradient is not None
        slow, fast = _BETAS
        self.first.lerp_(gradient, 1 - slow)
        self.second.mul_(fast).addcmul_(gradient, gradient, value=1 - fast)
        size = (self.second / (1 - fast**number)).sqrt_().add_(_SMALLEST)
        self.values.addcdiv_(self.first, size, value=-self._rate * factor / (1 - slow**number))
        gradient.zero_()


class Tuning:
    """Tunes the rounded weights of a model.

    Args:
        model: The model.
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
        model: StreamedModel,
        start: Mapping[str, Rounded],
        windows: Windows,
        *,
        schedule: Schedule,
        folder: Path,
        distributions: bool,
    ) -> None:
        self._model = model
        self._windows = windows
        self._schedule = schedule
        self._folder = folder
        self._distributions = distributions
        self._made = 0
        self.weights: dict[str, Tuned] = {}
        self._moved: list[Moved] = []
        for name, rounded in start.items():
            pieces = []
            for rows in model.layers[name].pieces:
                piece = self._zeros(tuple(rounded.places[rows].shape))
                pieces.append(piece.copy_(rounded.places[rows]))
            tuned = self.weights[name] = Tuned(rounded.weight.grid, rounded.weight.fitted, pieces)
            self._moved += [Moved(piece, schedule.rate, self._zeros) for piece in tuned.places]
            self._moved += [Moved(piece, schedule.scale_rate, self._zeros) for piece in tuned.factors]

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
        count, at_once = len(self._windows.fit), self._schedule.at_once
        references = References(
            self._model,
            self._windows,
            at_once=at_once,
            uses=self._schedule.steps * self._schedule.windows,
            file=self._folder / "references",
            on_window=on_window,
        )
        for step, chosen in enumerate(self._schedule.chosen(count)):
            if step < first:
                continue
            for start in range(0, len(chosen), at_once):
                on_window()
                group = chosen[start : start + at_once]
                exact = references.of(group)
                batch = self._windows.batch([self._windows.fit[index] for index in group])
                with self._model.rounded(self.weights):
                    loss = divergence(exact, self._model.outputs(batch), distributions=self._distributions)
                    loss.backward()
            for moved in self._moved:
                moved.step(step + 1, self._schedule.factor(step))
            on_step(step + 1)

    def state(self) -> dict[str, Tensor]:
        """Return all that another attempt needs to go on from here."""
        return {
            f"{index}.{part}": values
            for index, moved in enumerate(self._moved)
            for part, values in (
                ("values", moved.values.detach()),
                ("first", moved.first),
                ("second", moved.second),
            )
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        for index, moved in enumerate(self._moved):
            moved.values.copy_(state[f"{index}.values"])
            moved.first.copy_(state[f"{index}.first"])
            moved.second.copy_(state[f"{index}.second"])
