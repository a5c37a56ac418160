"""Round the weights of a model block by block, each with the inputs that the rounded blocks before it give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from slipway.errors import CheckpointValidationError, QuantizationError
from slipway.models.safetensors_file import read_safetensors
from slipway_quantize.calibration.finished import Finished
from slipway_quantize.calibration.rounding.gptq import DAMPING, damped, descend, error_factors, gptq, refit
from slipway_quantize.calibration.rounding.grid import Fitted, Grid
from slipway_quantize.calibration.rounding.roundings import Fixed
from slipway_quantize.calibration.streaming.crew import Crew
from slipway_quantize.calibration.streaming.layers import Layer
from slipway_quantize.calibration.streaming.moments import Moments, merge_moments, relative_errors
from slipway_quantize.calibration.streaming.walk import BlockWalk

_T = TypeVar("_T")
NEAREST = "rtn"
BY_INPUTS = (NEAREST, "awq", "gptq")
"""Methods that round one layer at a time, the simplest first."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """A layer's weight, rounded by one method.

    Attributes:
        weight: The rounded weight.
        places: Where the weights lay on the grid when they were rounded, float16; None if that follows from weights and scales. (N, K)
    """

    weight: Fixed
    places: Tensor | None

    def places_of(self, layer: Layer, rows: slice) -> Tensor:
        """Return where rows of the weight lay on the grid, float32."""
        if self.places is not None:
            return self.places[rows].float()
        return self.weight.grid.places(layer.exact(rows), self.weight.fitted.rows(rows))


Candidates = tuple[dict[str, Rounded], dict[str, float]]
"""A layer's weight rounded by each method, and the relative error of its results on held-out inputs."""


def round_layer(
    layer: Layer,
    method: str,
    grid: Grid,
    moments: Tensor | None,
    *,
    given: Fitted | None = None,
) -> Rounded:
    """Round a layer's weight.

    Args:
        layer: The layer.
        method: One of ``BY_INPUTS``.
        grid: The grid.
        moments: Second moments of its inputs; None for ``rtn``. (K, K)
        given: Scales and zero points that are known already; ``awq`` and ``gptq`` have the same.
    """
    importance = None
    if method != "rtn":
        assert moments is not None
        importance = moments.diagonal() + (DAMPING * float(moments.diagonal().mean()) + 1e-30)
    factors = error_factors(moments) if method == "gptq" and moments is not None else None
    codes = torch.empty(layer.stored.shape, dtype=torch.int8)
    places = torch.empty(layer.stored.shape, dtype=torch.float16) if factors else None
    fitted = []
    for rows in layer.pieces:
        weight = layer.exact(rows)
        fitted.append(grid.fit(weight, importance) if given is None else given.rows(rows))
        if factors is None or moments is None:
            found = grid.places(weight, fitted[-1])
        else:
            found = gptq(weight, fitted[-1], grid, *factors)
            stiff = damped(moments)
            fitted[-1] = refit(weight, found, fitted[-1], grid, stiff)
            found = descend(weight, found, fitted[-1], grid, order=factors[0], moments=stiff)
        codes[rows] = grid.nearest(found).to(torch.int8)
        if places is not None:
            places[rows] = found.clamp(grid.lowest - 1, grid.highest + 1)
    zeros = None if grid.symmetric else torch.cat([part.zeros for part in fitted if part.zeros is not None])
    return Rounded(Fixed(grid, codes, Fitted(torch.cat([part.scales for part in fitted]), zeros)), places)


class Rounds:
    """Rounds all layers of a walk by several methods, and continues with the best of each layer.

    Args:
        walks: The same walk for each member of the crew; its first batches are held out.
        crew: Computes batches, and rounds layers, side by side.
        judging: Number of held-out batches.
        methods: Methods to try; the chosen one is the best on held-out text of those in ``choices``.
        choices: Methods to choose from.
        grid: The grid.
        wide: Grids of more bits that some layers have, by name. What such a layer adds is not worth a search: it is rounded to the nearest.
        embedded: For a head that is the embedding too, by name: what is added to the moments of its inputs for each position. (K, K)
        finished: Keeps finished blocks.
        on_block: Called with the number of finished blocks, and often meanwhile.
    """

    def __init__(
        self,
        walks: Sequence[BlockWalk],
        *,
        crew: Crew,
        judging: int,
        methods: tuple[str, ...],
        choices: tuple[str, ...],
        grid: Grid,
        wide: Mapping[str, Grid],
        embedded: Mapping[str, Tensor],
        finished: Finished,
        on_block: Callable[[int], None],
    ) -> None:
        self._walks = walks
        self._walk = walks[0]
        self._crew = crew
        self._judging = judging
        self._methods = methods
        self._choices = choices
        self._grid = grid
        self._wide = wide
        self._embedded = embedded
        self._positions = [sum(int(batch.mask.sum()) for batch in part) for part in self._parts(self._walk.batches)]
        self._finished = finished
        self._on_block = on_block
        self.resumed = 0

    def run(self) -> None:
        """Round every block that is not finished yet."""
        count = len(self._walk.names)
        done = 0
        while done < count and self._finished.has(f"block-{done}"):
            done += 1
        if done and not self._has_inputs(done):
            done = 0
        self._walk.drop_before(done)
        self.resumed = done
        for index in range(done, count):
            self._on_block(index)
            self._block(index)
            if index:
                self._walk.drop(index)
        self._on_block(count)

    def _has_inputs(self, index: int) -> bool:
        """Return whether a block can be computed: its inputs are there, and whole; nothing follows the last block."""
        try:
            for path in self._walk.needed(index) if index < len(self._walk.names) else []:
                read_safetensors(path)
        except (OSError, CheckpointValidationError):
            return False
        return True

    def _block(self, index: int) -> None:
        candidates = self._candidates(index)
        tensors: dict[str, Tensor] = {}
        facts: dict[str, dict[str, float]] = {}
        for name, (rounded, errors) in candidates.items():
            for method, one in rounded.items():
                tensors |= _stored(f"{name}@{method}", one)
            facts[name] = errors
        if index < len(self._walk.names) - 1:
            self._keep(
                index,
                {name: each[best_method(errors, self._choices)].weight for name, (each, errors) in candidates.items()},
            )
        self._finished.put(f"block-{index}", tensors, errors=facts)

    def _keep(self, index: int, rounded: Mapping[str, Fixed]) -> None:
        """Compute the block with its rounded weights, and leave the results as inputs of the next one."""

        def keep(member: int) -> None:
            walk = self._walks[member]
            layers = walk.layers(index)
            for layer in layers:
                layer.rounding = rounded.get(layer.name)
            try:
                for number in self._crew.share(member, range(len(walk.batches))):
                    self._on_block(index)
                    walk.keep(index, [number])
            finally:
                for layer in layers:
                    layer.rounding = None

        self._crew.run(keep)

    def _candidates(self, index: int) -> dict[str, Candidates]:
        """Round each layer by every method, and judge the results on held-out inputs."""
        layers = self._walk.layers(index)
        if not layers:
            return {}
        held_out, fit = self._moments(index)
        seen = [layer for layer in layers if layer.name in fit.shared]

        def rounded(_: int, layer: Layer) -> Candidates:
            moments = self._with_embedding(layer.name, fit.of(layer.name), self._positions[1])
            # A layer that no held-out text reaches is judged by what it was fitted to.
            judging = moments
            if layer.name in held_out.shared:
                judging = self._with_embedding(layer.name, held_out.of(layer.name), self._positions[0])
            for each in (moments, judging):
                _require_finite(each, layer.name)
            found = self._round(index, layer, moments)
            return found, relative_errors(layer, {method: one.weight for method, one in found.items()}, judging)

        return {layer.name: each for layer, each in zip(seen, self._crew.map(rounded, seen), strict=True)}

    def _with_embedding(self, name: str, moments: Tensor, positions: int) -> Tensor:
        """Return the moments of a layer's inputs at so many positions, with what the errors of an embedding of the same codes count."""
        return moments + positions * self._embedded[name] if name in self._embedded else moments

    def _parts(self, batches: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T]]:
        """Divide batches into those that are held out and those to fit to."""
        return batches[: self._judging], batches[self._judging :]

    def _round(self, index: int, layer: Layer, moments: Tensor) -> dict[str, Rounded]:
        if layer.name in self._wide:
            return {NEAREST: round_layer(layer, NEAREST, self._wide[layer.name], None)}
        made: dict[str, Rounded] = {}
        for method in self._methods:
            self._on_block(index)
            weighted = made.get("awq") if method == "gptq" else None
            made[method] = round_layer(
                layer,
                method,
                self._grid,
                moments,
                given=weighted.weight.fitted if weighted else None,
            )
        return made

    def _moments(self, index: int) -> list[Moments]:
        """Return the moments of the layers' inputs: of held-out windows, and of those to fit to."""
        parts = self._parts(range(len(self._walk.batches)))

        def gather(member: int) -> list[Moments]:
            walk = self._walks[member]
            layers = walk.layers(index)
            found = []
            for part in parts:
                moments = Moments(layer.name for layer in layers)
                with moments.watch(layers):
                    for number in self._crew.share(member, part):
                        self._on_block(index)
                        moments.begin(walk.batches[number].masks)
                        for _ in walk.compute(index, [number]):
                            pass
                found.append(moments)
            return found

        return [merge_moments(each) for each in zip(*self._crew.run(gather), strict=True)]


def best_method(errors: Mapping[str, float], choices: Iterable[str]) -> str:
    """Return the method of the smallest error among those to choose from; a layer that no choice was tried for is rounded to the nearest."""
    return min((method for method in choices if method in errors), key=errors.__getitem__, default=NEAREST)


def _require_finite(moments: Tensor, name: str) -> None:
    if not bool(moments.isfinite().all()):
        raise QuantizationError(
            f"the model computes NaN or infinity in front of {name!r}",
            reason="NON_FINITE_OUTPUT",
            remedy="the training diverged or the merged model is damaged: use an earlier checkpoint",
            about={"tensor": name},
        )


def _stored(name: str, rounded: Rounded) -> dict[str, Tensor]:
    made = {f"{name}.codes": rounded.weight.codes, f"{name}.scales": rounded.weight.fitted.scales}
    if rounded.weight.fitted.zeros is not None:
        made[f"{name}.zeros"] = rounded.weight.fitted.zeros
    if rounded.places is not None:
        made[f"{name}.places"] = rounded.places
    return made


def read_rounded(tensors: Mapping[str, Tensor], name: str, method: str, grid: Grid) -> Rounded:
    """Return what a finished block has of a layer; what it is rounded to the nearest to, if it was rounded in no other way."""
    start = f"{name}@{method}" if f"{name}@{method}.codes" in tensors else f"{name}@{NEAREST}"
    fitted = Fitted(tensors[f"{start}.scales"], tensors.get(f"{start}.zeros"))
    codes = tensors[f"{start}.codes"]
    return Rounded(Fixed(grid, codes, fitted), tensors.get(f"{start}.places"))
