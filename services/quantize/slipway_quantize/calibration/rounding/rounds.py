"""Round the weights of a model block by block, each with the inputs that the rounded blocks before it give."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipway.errors import CheckpointValidationError, QuantizationError
from slipway.models.safetensors_file import read_safetensors
from slipway_quantize.calibration.finished import Finished
from slipway_quantize.calibration.rounding.gptq import DAMPING, error_factors, gptq
from slipway_quantize.calibration.rounding.grid import Fitted, Grid
from slipway_quantize.calibration.rounding.roundings import Fixed
from slipway_quantize.calibration.streaming.layers import Layer
from slipway_quantize.calibration.streaming.moments import Errors, Moments
from slipway_quantize.calibration.streaming.walk import BlockWalk

TIED_DAMPING = 0.5
"""For a head that is the embedding too: errors of all columns count there, whatever the head's inputs are."""
BY_INPUTS = ("rtn", "awq", "gptq")
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


def round_layer(
    layer: Layer,
    method: str,
    grid: Grid,
    moments: Tensor | None,
    *,
    damping: float = DAMPING,
    given: Fitted | None = None,
) -> Rounded:
    """Round a layer's weight.

    Args:
        layer: The layer.
        method: One of ``BY_INPUTS``.
        grid: The grid.
        moments: Second moments of its inputs; None for ``rtn``. (K, K)
        damping: Share of the moments' mean that is added to each input's own.
        given: Scales and zero points that are known already; ``awq`` and ``gptq`` have the same.
    """
    importance = None
    if method != "rtn":
        assert moments is not None
        importance = moments.diagonal() + (damping * float(moments.diagonal().mean()) + 1e-30)
    factors = error_factors(moments, damping=damping) if method == "gptq" and moments is not None else None
    codes = torch.empty(layer.stored.shape, dtype=torch.int8)
    places = torch.empty(layer.stored.shape, dtype=torch.float16) if factors else None
    fitted = []
    for rows in layer.pieces:
        weight = layer.exact(rows)
        fitted.append(grid.fit(weight, importance) if given is None else given.rows(rows))
        found = gptq(weight, fitted[-1], grid, *factors) if factors else grid.places(weight, fitted[-1])
        codes[rows] = grid.nearest(found).to(torch.int8)
        if places is not None:
            places[rows] = found.clamp(grid.lowest - 1, grid.highest + 1)
    zeros = None if grid.symmetric else torch.cat([part.zeros for part in fitted if part.zeros is not None])
    return Rounded(Fixed(grid, codes, Fitted(torch.cat([part.scales for part in fitted]), zeros)), places)


class Rounds:
    """Rounds all layers of a walk by several methods, and continues with the best of each layer.

    Args:
        walk: The walk; its first batches are held out.
        judging: Number of held-out batches.
        methods: Methods to try; the chosen one is the best on held-out text of those in ``choices``.
        choices: Methods to choose from.
        grid: The grid.
        tied: Names of weights that are embeddings too.
        finished: Keeps finished blocks.
        on_block: Called with the number of finished blocks, and often meanwhile.
    """

    def __init__(
        self,
        walk: BlockWalk,
        *,
        judging: int,
        methods: tuple[str, ...],
        choices: tuple[str, ...],
        grid: Grid,
        tied: Collection[str],
        finished: Finished,
        on_block: Callable[[int], None],
    ) -> None:
        self._walk = walk
        self._judging = judging
        self._methods = methods
        self._choices = choices
        self._grid = grid
        self._tied = tied
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
        layers = self._walk.layers(index)
        candidates = self._candidates(index, layers)
        tensors: dict[str, Tensor] = {}
        facts: dict[str, dict[str, float]] = {}
        for name, each in candidates.items():
            for method, one in each[0].items():
                tensors |= _stored(f"{name}@{method}", one)
            facts[name] = each[1]
        if index < len(self._walk.names) - 1:
            for layer in layers:
                if layer.name in candidates:
                    rounded, errors = candidates[layer.name]
                    layer.rounding = rounded[self._chosen(errors)].weight
            self._keep(index)
            for layer in layers:
                layer.rounding = None
        self._finished.put(f"block-{index}", tensors, errors=facts)

    def _keep(self, index: int) -> None:
        for number in range(len(self._walk.batches)):
            self._on_block(index)
            self._walk.keep(index, [number])

    def _chosen(self, errors: Mapping[str, float]) -> str:
        return min(self._choices, key=lambda method: errors[method])

    def _candidates(self, index: int, layers: list[Layer]) -> dict[str, tuple[dict[str, Rounded], dict[str, float]]]:
        """Round each layer by every method, and judge the results on held-out inputs."""
        if not layers:
            return {}
        moments = Moments(layer.name for layer in layers)
        batches = range(self._judging, len(self._walk.batches))
        with moments.watch(layers):
            for number in batches:
                self._on_block(index)
                moments.begin(self._walk.batches[number].masks)
                for _ in self._walk.compute(index, [number]):
                    pass
        rounded: dict[str, dict[str, Rounded]] = {}
        for layer in layers:
            if layer.name not in moments.shared:
                continue
            _require_finite(moments.of(layer.name), layer.name)
            rounded[layer.name] = {}
            for method in self._methods:
                self._on_block(index)
                weighted = rounded[layer.name].get("awq") if method == "gptq" else None
                rounded[layer.name][method] = round_layer(
                    layer,
                    method,
                    self._grid,
                    moments.of(layer.name),
                    damping=TIED_DAMPING if layer.name in self._tied else DAMPING,
                    given=weighted.weight.fitted if weighted else None,
                )
        errors = Errors({name: {method: one.weight for method, one in each.items()} for name, each in rounded.items()})
        seen = [layer for layer in layers if layer.name in rounded]
        with errors.watch(seen):
            for number in range(self._judging):
                self._on_block(index)
                errors.begin(self._walk.batches[number].masks)
                for _ in self._walk.compute(index, [number]):
                    pass
        return {
            name: (each, {method: errors.relative(name, method) for method in each}) for name, each in rounded.items()
        }


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
    """Return what a finished block has of a layer."""
    start = f"{name}@{method}"
    fitted = Fitted(tensors[f"{start}.scales"], tensors.get(f"{start}.zeros"))
    codes = tensors[f"{start}.codes"]
    return Rounded(Fixed(grid, codes, fitted), tensors.get(f"{start}.places"))
