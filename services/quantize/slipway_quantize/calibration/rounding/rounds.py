"""Round the weights of a model block by block, each with the inputs that the rounded blocks before it give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from slipway.errors import CheckpointValidationError, QuantizationError
from slipway.model.safetensors_file import read_safetensors
from slipway_quantize.calibration.finished import Finished
from slipway_quantize.calibration.rounding.grid import Fixed, Grid
from slipway_quantize.calibration.rounding.methods import (
    NEAREST,
    Candidates,
    Corrected,
    Rounded,
    best_method,
    correction,
    error_factors,
    round_layer,
    rounded_tensors,
)
from slipway_quantize.calibration.streaming.crew import Crew
from slipway_quantize.calibration.streaming.layers import Layer
from slipway_quantize.calibration.streaming.moments import Inputs, Moments, merge_moments, relative_errors
from slipway_quantize.calibration.streaming.walk import BlockWalk
from slipway_quantize.experts import EXPERT

_T = TypeVar("_T")
_MOMENTS_BYTES = 1 << 30
"""Most bytes of the moments of the experts that are rounded together."""


@dataclass(frozen=True, slots=True)
class _InputFacts:
    """Facts about inputs that some layers share.

    Attributes:
        factors: As :func:`error_factors` returns them.
        change: As :func:`correction` returns it; None if the exact inputs are not known. (K, K)
    """

    factors: tuple[Tensor, Tensor]
    change: Tensor | None


class Rounds:
    """Rounds all layers of a walk by several methods, and continues with the best of each layer.

    Args:
        walks: The same walk for each member of the crew; its first batches are held out.
        exact: A walk over the batches to fit to for each member, in which nothing is rounded; none if no method reads inputs.
        crew: Computes batches, and rounds layers, side by side.
        judging: Number of held-out batches.
        methods: Methods to try; the chosen one is the best on held-out text of those in ``choices``.
        choices: Methods to choose from.
        grid: The grid.
        wide: Grids of more bits that some layers have, by name. The error of such a layer is not worth a search: it is rounded to the nearest.
        embedded: Added to the moments of a head's inputs for each position if the head is the embedding too, by name. (K, K)
        finished: Keeps finished blocks.
        on_block: Called with the number of finished blocks, and often meanwhile.
    """

    def __init__(
        self,
        walks: Sequence[BlockWalk],
        *,
        exact: Sequence[BlockWalk],
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
        self._exact = exact
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
        chains = (self._walk, *self._exact[:1])
        for chain in chains:
            chain.drop_before(done)
        self.resumed = done
        for index in range(done, count):
            self._on_block(index)
            self._block(index)
            for chain in chains if index else ():
                chain.drop(index)
        self._on_block(count)

    def _has_inputs(self, index: int) -> bool:
        """Return whether a block can be computed: its inputs are there, and whole; nothing follows the last block."""
        chains = (self._walk, *self._exact[:1]) if index < len(self._walk.names) else ()
        try:
            for path in (path for chain in chains for path in chain.input_files(index)):
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
                tensors |= rounded_tensors(f"{name}@{method}", one)
            facts[name] = errors
        if index < len(self._walk.names) - 1:
            self._keep(index, self._best_weights(candidates))
        self._finished.put(f"block-{index}", tensors, errors=facts)

    def _keep(self, index: int, rounded: Mapping[str, Fixed]) -> None:
        """Compute the block with its rounded weights, and leave the results as inputs of the next one."""

        def keep(member: int) -> None:
            walk = self._walks[member]
            with _use_rounded(walk.layers(index), rounded):
                for number in self._crew.share(member, range(len(walk.batches))):
                    self._on_block(index)
                    walk.keep(index, [number])

        self._crew.run(keep)

    def _candidates(self, index: int) -> dict[str, Candidates]:
        """Round each layer by every method, and judge the results on held-out inputs."""
        layers = self._walk.layers(index)
        candidates: dict[str, Candidates] = {}
        passes = _passes(layers, corrects=bool(self._exact))
        for place, names in enumerate(passes):
            candidates |= self._pass(index, names, candidates, last=place == len(passes) - 1)
        return {layer.name: candidates[layer.name] for layer in layers if layer.name in candidates}

    def _pass(
        self, index: int, names: frozenset[str], before: Mapping[str, Candidates], *, last: bool
    ) -> dict[str, Candidates]:
        """Round some layers of a block in which the layers ``before`` are rounded already."""
        held_out, fit = self._moments(index, names, self._best_weights(before), last=last)
        seen = [layer for layer in self._walk.layers(index) if layer.name in fit.shared]
        moments = {
            layer.name: self._add_embedding(layer.name, fit.of(layer.name), self._positions[1]) for layer in seen
        }
        for name, products in moments.items():
            _require_finite(products, name)
        known = self._find_facts(index, seen, fit, moments)

        def round_one(_: int, layer: Layer) -> Candidates:
            own = moments[layer.name]
            # A layer that no held-out text reaches is judged by the inputs that it was fitted to.
            judging = own
            if layer.name in held_out.shared:
                judging = self._add_embedding(layer.name, held_out.of(layer.name), self._positions[0])
                _require_finite(judging, layer.name)
            return self._round(index, layer, own, judging, known.get(self._kind(layer.name, fit)))

        return {layer.name: each for layer, each in zip(seen, self._crew.map(round_one, seen), strict=True)}

    def _kind(self, name: str, fit: Moments) -> str:
        """Return the name of the first layer with the same moments."""
        return name if name in self._embedded else fit.shared[name]

    def _find_facts(
        self, index: int, layers: Sequence[Layer], fit: Moments, moments: Mapping[str, Tensor]
    ) -> dict[str, _InputFacts]:
        """Return the facts about each kind of inputs that layers are rounded by or corrected for, by :meth:`_kind`."""
        tunes = "gptq" in self._methods
        needed = {
            self._kind(layer.name, fit): layer.name
            for layer in layers
            if (tunes and layer.name not in self._wide) or fit.drift_of(layer.name) is not None
        }

        def find_facts(_: int, name: str) -> _InputFacts:
            self._on_block(index)
            factors = error_factors(moments[name])
            drift = fit.drift_of(name)
            if drift is not None:
                _require_finite(drift, name)
            return _InputFacts(factors, None if drift is None else correction(drift, *factors))

        return dict(zip(needed, self._crew.map(find_facts, list(needed.values())), strict=True))

    def _best_weights(self, candidates: Mapping[str, Candidates]) -> dict[str, Fixed]:
        """Return each layer's weight by its best method, as the blocks after it see it."""
        return {name: each[best_method(errors, self._choices)].weight for name, (each, errors) in candidates.items()}

    def _add_embedding(self, name: str, moments: Tensor, positions: int) -> Tensor:
        """Add the weight of errors of an embedding with the same codes to the moments of a layer's inputs at so many positions."""
        return moments + positions * self._embedded[name] if name in self._embedded else moments

    def _parts(self, batches: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T]]:
        """Divide batches into those that are held out and those to fit to."""
        return batches[: self._judging], batches[self._judging :]

    def _round(
        self, index: int, layer: Layer, moments: Tensor, judging: Tensor, known: _InputFacts | None
    ) -> Candidates:
        """Round a layer by every method, and return the errors on inputs with the moments ``judging``."""
        wide = self._wide.get(layer.name)
        wanted = layer if known is None or known.change is None else Corrected(layer, known.change)
        made: dict[str, Rounded] = {}
        if wide is not None:
            made[NEAREST] = round_layer(wanted, NEAREST, wide)
        for method in self._methods if wide is None else ():
            self._on_block(index)
            weighted = made.get("awq") if method == "gptq" else None
            made[method] = round_layer(
                layer if method == NEAREST else wanted,
                method,
                self._grid,
                moments,
                factors=known.factors if known else None,
                given=weighted.weight.fitted if weighted else None,
            )
        return made, relative_errors(wanted, {method: one.weight for method, one in made.items()}, judging)

    def _moments(self, index: int, names: frozenset[str], rounded: Mapping[str, Fixed], *, last: bool) -> list[Moments]:
        """Return the moments of some layers' inputs, of held-out windows and of those to fit to, with some layers rounded.

        The ``last`` pass of a block also keeps the exact block's results as inputs of the next one.
        """
        parts = self._parts(range(len(self._walk.batches)))
        keeps = last and index < len(self._walk.names) - 1

        def gather(member: int) -> list[Moments]:
            walk, observers = self._walks[member], []
            layers = [layer for layer in walk.layers(index) if layer.name in names]
            for held_out, part in zip((True, False), parts, strict=True):
                moments = Moments(names)
                for number in self._crew.share(member, part):
                    self._on_block(index)
                    exact = {} if held_out else self._exact_inputs(member, index, number, layers, keeps=keeps)
                    moments.begin(walk.batches[number].masks, exact)
                    with _use_rounded(walk.layers(index), rounded), moments.watch(layers):
                        for _ in walk.compute(index, [number]):
                            pass
                moments.begin(())  # so that the last batch's inputs do not stay
                observers.append(moments)
            return observers

        return [merge_moments(each) for each in zip(*self._crew.run(gather), strict=True)]

    def _exact_inputs(
        self, member: int, index: int, number: int, layers: Sequence[Layer], *, keeps: bool
    ) -> dict[str, Tensor]:
        """Return what some layers' inputs would be in a batch if nothing were rounded."""
        if not self._exact:
            return {}
        walk, number = self._exact[member], number - self._judging
        inputs = Inputs((layer.name for layer in layers), to_the_end=keeps)
        inputs.begin(walk.batches[number].masks)
        with inputs.watch(layers):
            if keeps:
                walk.keep(index, [number])
            else:
                for _ in walk.compute(index, [number]):
                    pass
        return inputs.found


def _passes(layers: Sequence[Layer], *, corrects: bool) -> list[frozenset[str]]:
    """Divide a block's layers into those that are rounded together.

    The first layer usually reads the hidden states. Layers with wider inputs follow the others, such as the second of a feed-forward network.
    Its moments then include the changes that the others made to its inputs, which are most of what it can make up for.
    """
    width = layers[0].stored.shape[1] if layers else 0
    late = frozenset(layer.name for layer in layers if corrects and layer.stored.shape[1] > width)
    experts = [layer for layer in layers if EXPERT.match(layer.name)]
    early = frozenset(layer.name for layer in layers) - late - {layer.name for layer in experts}
    return [names for names in (early, late - {layer.name for layer in experts}) if names] + _expert_passes(experts)


def _expert_passes(experts: Sequence[Layer]) -> list[frozenset[str]]:
    """Divide a block's experts into passes: each expert has moments of its own, and those of all of them may not fit into memory."""
    passes: list[set[str]] = []
    room = 0
    for layer in experts:
        room -= 2 * 4 * layer.stored.shape[1] ** 2  # of held-out windows and of those to fit to
        if room < 0:
            passes.append(set())
            room = _MOMENTS_BYTES
        passes[-1].add(layer.name)
    return [frozenset(names) for names in passes]


@contextmanager
def _use_rounded(layers: Sequence[Layer], rounded: Mapping[str, Fixed]) -> Iterator[None]:
    """Let layers compute with their rounded weights, if they have any."""
    for layer in layers:
        layer.rounding = rounded.get(layer.name)
    try:
        yield
    finally:
        for layer in layers:
            layer.rounding = None


def _require_finite(moments: Tensor, name: str) -> None:
    if not bool(moments.isfinite().all()):
        raise QuantizationError(
            f"the model computes NaN or infinity in front of {name!r}",
            reason="NON_FINITE_OUTPUT",
            remedy="the training diverged or the merged model is damaged: use an earlier checkpoint",
            about={"tensor": name},
        )
