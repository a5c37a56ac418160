"""Measure what outputs hold of the adapter: one pass over the adapted weights, and a second over those that hold something else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from slipway.errors import ModelExportError
from slipway.validation.survival import AdapterSurvival, ModuleSurvival
from slipway_validate.runner.model import Unusable
from slipway_validate.runner.survival.adapted import AdaptedModule, adapted_modules
from slipway_validate.runner.survival.checkpoints import Checkpoint
from slipway_validate.runner.survival.stored import Dense, Names, NotUnderstoodError, Rows, StoredModel

MOST_VALUES = 1 << 20
"""Values of a weight that are compared: rows at even distances, so that a joined or half lost weight shows too."""
MOST_COMPARED = 1 << 16
"""Values that are compared with other modules' weights, to name what lies there instead."""
MOST_MODULES = 4096
"""Adapted modules that are compared, at even distances: a mixture of experts has a hundred thousand."""
MOST_PAIRS = 1 << 14
"""Pairs of modules of one kind that are compared to name what lies where."""
PRESENT = 0.5
"""Strength below which a module has lost its update, and distance from 1 above which something else may lie there."""
STRANGE_WEIGHT = 0.9
"""Error of a weight above which it is another one: that of two independent weights is 1.4, the coarsest rounding's 0.5."""
_FAULTS = (NotUnderstoodError, ModelExportError, OSError, ValueError, LookupError, ArithmeticError, RuntimeError)
"""What reading weights of an unknown form may raise: then they are not understood, and other outputs are compared."""
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(slots=True)
class _Output:
    """An output whose weights are compared."""

    stored: StoredModel
    names: Names = field(init=False)
    modules: dict[str, ModuleSurvival] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = Names(self.stored.names)


@dataclass(frozen=True)
class _Both:
    """Some rows of W and of W + Δ, and what comparing any stored weight with them needs.

    Attributes:
        before: W. (R, K)
        after: W + Δ. (R, K)
        shape: Shape of the whole, (N, K).
        dtype: Type in which W is stored.
    """

    before: Tensor
    after: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def update(self) -> Tensor:
        """Return Δ, (R, K)."""
        return self.after - self.before

    @cached_property
    def update_square(self) -> float:
        """Return |Δ|²."""
        return _dot(self.update, self.update)

    @cached_property
    def after_square(self) -> float:
        """Return |W + Δ|²."""
        return _dot(self.after, self.after)

    @cached_property
    def expected(self) -> float:
        """Return the strength that rounding W + Δ to the type of W leaves."""
        if self.dtype in (torch.float32, torch.float64):
            return 1.0
        found = figures(self, self.after.to(self.dtype).float()).strength
        return 1.0 if found is None else found

    def moved_to(self, other: _Both) -> _Both:
        """Return the same rows of W with another module's Δ."""
        return _Both(self.before, self.before + other.update, self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a module, as in :class:`slipway.validation.survival.ModuleSurvival`."""

    strength: float | None = None
    noise: float | None = None
    cosine: float | None = None
    weight_error: float | None = None


class _Base:
    """The base's weights, by the names that the model gives them."""

    def __init__(self, folder: Path) -> None:
        self._stored = Checkpoint(folder)
        self._names = Names(self._stored.names)

    def weight(self, module: AdaptedModule) -> Tensor:
        """Return W as (N, K), in its stored type.

        Raises:
            NotUnderstoodError: The base stores it under another name or in another form.
        """
        name = self._names.find(module.weight) or (self._names.find(module.tied) if module.tied else None)
        if name is None:
            raise NotUnderstoodError("the base has no weight of this name")
        found = self._stored.weight(name, turned=module.turned)
        return found.values if isinstance(found, Dense) else found.take(slice(None)).stored

    def rows(self, weight: str) -> int:
        """Return the number of output features of a linear layer's weight; 0 if the base has none of this name."""
        name = self._names.find(weight)
        return self._stored.weight(name, turned=False).shape[0] if name else 0


def measure(
    base: Path,
    adapter: Path,
    outputs: Mapping[str, Path],
    *,
    report: Callable[[int, int], None],
) -> dict[str, AdapterSurvival]:
    """Return what each output holds of the adapter.

    It computes with one thread: several would wait for each other longer than a weight takes, and an output is computed beside it.

    Args:
        base: Folder of the base.
        adapter: Folder of the adapter.
        outputs: Folders of the outputs by name.
        report: Called with the modules that are done, and all.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(base, adapter, outputs, report=report)
    finally:
        torch.set_num_threads(threads)


def _measure(
    base: Path, adapter: Path, outputs: Mapping[str, Path], *, report: Callable[[int, int], None]
) -> dict[str, AdapterSurvival]:
    try:
        modules, left_out = adapted_modules(base, adapter)
        weights = _Base(base)
    except (NotUnderstoodError, Unusable, ModelExportError, OSError, ValueError, RuntimeError) as error:
        return {name: AdapterSurvival(not_run=f"{error}") for name in outputs}
    found: dict[str, AdapterSurvival] = {}
    opened: dict[str, _Output] = {}
    for name, folder in outputs.items():
        try:
            opened[name] = _Output(_open(folder, weights.rows))
        except _FAULTS as error:
            found[name] = AdapterSurvival(not_run=_said(error))
    chosen = modules[:: max(1, math.ceil(len(modules) / MOST_MODULES))]
    for number, module in enumerate(chosen):
        report(number, len(chosen))
        _compare(module, weights, opened, left_out)
    for name, output in opened.items():
        try:
            found[name] = _survival(output, chosen, weights, left_out)
        except _FAULTS as error:
            found[name] = AdapterSurvival(not_run=_said(error))
    report(len(chosen), len(chosen))
    return found


def _survival(
    output: _Output, modules: list[AdaptedModule], weights: _Base, left_out: Mapping[str, str]
) -> AdapterSurvival:
    """Return what an output holds, after all modules were compared.

    Raises:
        NotUnderstoodError: The output's weights cannot be read whole; other errors of reading them too.
    """
    _name_strangers(output, modules, weights)
    kept = tuple(output.modules.values())
    without = {**left_out, **output.left_out}
    return AdapterSurvival(
        modules=kept,
        left_out=without,
        non_finite=output.stored.non_finite(),
        not_run="" if kept else next(iter(without.values()), "no module is adapted"),
    )


def _said(error: Exception) -> str:
    return (
        str(error) if isinstance(error, NotUnderstoodError | ModelExportError) else f"{type(error).__name__}: {error}"
    )


def _open(folder: Path, rows: Callable[[str], int]) -> StoredModel:
    if any(folder.glob("*.onnx")) or (folder / "onnx-layered").is_dir():
        try:
            from slipway_validate.runner.survival.graphs import Graphs
        except ImportError as error:
            raise NotUnderstoodError(f"graphs cannot be read here: pip install {error.name}") from error
        return Graphs(folder, rows)
    if any(folder.glob("*.safetensors")):
        return Checkpoint(folder)
    raise NotUnderstoodError("its weights lie neither in safetensors nor in an ONNX graph, and others are not read")


def _compare(module: AdaptedModule, weights: _Base, outputs: Mapping[str, _Output], left_out: dict[str, str]) -> None:
    """Compare one module in every output."""
    try:
        own = _both(module, weights, MOST_VALUES)
    except NotUnderstoodError as error:
        left_out[module.name] = str(error)
        return
    for output in outputs.values():
        try:
            stored = _stored(output, module, own, MOST_VALUES)
            output.modules[module.name] = ModuleSurvival(
                module=module.name,
                layer=_layer(module.name),
                changed=stored.changed_from(own.before),
                expected=own.expected,
                **asdict(figures(own, stored.values)),
            )
        except _FAULTS as error:
            output.left_out[module.name] = _said(error)


def _both(module: AdaptedModule, weights: _Base, most: int) -> _Both:
    whole = weights.weight(module)
    merged = module.merged(whole.T if module.turned else whole)
    shape = tuple(whole.shape)
    rows = _rows(shape, most)
    after = merged.T if module.turned else merged
    return _Both(whole[rows].float().contiguous(), after[rows].contiguous(), shape, whole.dtype)


def _stored(output: _Output, module: AdaptedModule, own: _Both, most: int) -> Rows:
    name = output.names.find(module.weight) or (output.names.find(module.tied) if module.tied else None)
    if name is None:
        raise NotUnderstoodError("the output has no weight of this name")
    weight = output.stored.weight(name, turned=module.turned)
    if weight.shape != own.shape:
        raise NotUnderstoodError(f"the output has it in another shape: {weight.shape} instead of {own.shape}")
    return weight.take(_rows(own.shape, most))


def _rows(shape: tuple[int, ...], most: int) -> slice:
    return slice(None, None, max(1, math.ceil(math.prod(shape) / most)))


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def figures(own: _Both, stored: Tensor) -> Figures:
    """Return the figures of a module that stores Q(W + Δ), (R, K)."""
    change, distance = stored - own.before, stored - own.after
    size, moved, common = own.update_square, _dot(change, change), _dot(change, own.update)
    error, whole = _dot(distance, distance), own.after_square
    weight_error = math.sqrt(error / whole) if whole and math.isfinite(error) else None
    if not size or not math.isfinite(common) or not math.isfinite(size):
        return Figures(weight_error=weight_error)
    noise = max(moved - common * common / size, 0.0) / size / change.numel()
    return Figures(
        strength=common / size,
        noise=math.sqrt(noise),
        cosine=common / math.sqrt(size * moved) if moved else 0.0,
        weight_error=weight_error,
    )


def _dot(first: Tensor, second: Tensor) -> float:
    """Return the sum of products; each row in float32, the rows in float64."""
    return float(torch.linalg.vecdot(first, second).double().sum())


def _name_strangers(output: _Output, modules: list[AdaptedModule], weights: _Base) -> None:
    """Find out which module's weight or update lies where a module's own does not."""
    strange = {each.module: each for each in output.modules.values() if _is_strange(each)}
    if not strange or len(strange) == len(
        output.modules
    ):  # then nothing was exchanged: it is another model, or the base
        return
    kinds: dict[tuple[object, ...], list[AdaptedModule]] = {}
    for module in modules:
        kinds.setdefault(_kind(module.name), []).append(module)
    for alike in kinds.values():
        suspects = [module for module in alike if module.name in strange]
        if suspects and len(alike) > 1:
            _compare_with_others(output, suspects[: max(1, MOST_PAIRS // len(alike))], alike, weights)


def _is_strange(found: ModuleSurvival) -> bool:
    other = found.weight_error is not None and found.weight_error > STRANGE_WEIGHT
    return other or (found.strength is not None and abs(found.strength - found.expected) > PRESENT)


def _kind(name: str) -> tuple[object, ...]:
    """Return what modules of different layers that do the same have in common."""
    return tuple("#" if part.isdigit() else part for part in name.split("."))


def _compare_with_others(
    output: _Output, suspects: list[AdaptedModule], alike: list[AdaptedModule], weights: _Base
) -> None:
    own: dict[str, tuple[_Both, Tensor]] = {}
    for module in suspects:
        both = _both(module, weights, MOST_COMPARED)
        own[module.name] = both, _stored(output, module, both, MOST_COMPARED).values
    for other in alike:
        try:
            theirs = _both(other, weights, MOST_COMPARED)
        except NotUnderstoodError:
            continue
        for name, (both, stored) in own.items():
            if name != other.name and stored.shape == theirs.after.shape:
                found = _other_in(both, stored, theirs)
                if found:
                    output.modules[name] = output.modules[name].model_copy(update={found: other.name})


def _other_in(own: _Both, stored: Tensor, other: _Both) -> str:
    """Return the field that says what of another module is stored: its weight, or its update of one's own; empty for neither."""
    error = figures(other, stored).weight_error
    if error is not None and error < PRESENT:
        return "weight_of"
    moved = figures(own.moved_to(other), stored)
    strength, noise = moved.strength, moved.noise
    there = strength is not None and noise is not None and abs(strength - 1) < PRESENT - 4 * noise
    return "update_of" if there else ""
