"""Measure what outputs hold of the adapter: one pass over the adapted weights, and a second over those that hold something else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from slipway.errors import ModelExportError
from slipway.formats import Runtime
from slipway.formats.registry import runtime_of_output
from slipway.model.folder import ModelFolder
from slipway.model.safetensors_file import read_weights
from slipway.proof.runtime import Unusable
from slipway.proof.stored_weights import Names, NotUnderstoodError, StoredModel, StoredWeight
from slipway.validation.survival import AdapterSurvival, ModuleSurvival
from slipway_validate.protocol.messages import SurvivalSpec
from slipway_validate.runner.survival.adapted import Adapted, BaseWeights, Original, adapted_modules, find_name
from slipway_validate.runner.survival.checkpoints import Checkpoint
from slipway_validate.runner.survival.routers import is_one_of, is_rounded, rounded_on_request, routers_of
from slipway_validate.runner.survival.sums import Both, Sums

MOST_VALUES = 1 << 20
"""Values of a weight that are compared: rows at even distances, so that a joined or half lost weight shows too."""
PIECE = 1 << 16
"""Values that are compared at a time: a dozen arrays of them stay in the processor's caches."""
MOST_COMPARED = 1 << 16
"""Values that are compared with other modules' weights, to name what lies there instead."""
MOST_MODULES = 4096
"""Adapted modules that are compared, at even distances: a mixture of experts has a hundred thousand."""
MOST_PAIRS = 1 << 14
"""Pairs of modules of one kind that are compared to name what lies where."""
PRESENT = 0.5
"""Strength below which a module has lost its update, and distance from 1 above which something else may lie there."""
OFF, SURE = 0.02, 4.0
"""Share of an update, and standard errors, by which a module may hold less or more of it without a second look."""
STRANGE_WEIGHT = 0.9
"""Error of a weight above which it is another one: that of two independent weights is 1.4, the coarsest rounding's 0.5."""
_FAULTS = (NotUnderstoodError, ModelExportError, OSError, ValueError, LookupError, ArithmeticError, RuntimeError)
"""What reading weights of an unknown form may raise: then they are not understood, and other outputs are compared."""
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(slots=True)
class _Output:
    """An output whose weights are compared."""

    stored: StoredModel
    largest_error: float
    folder: Path
    names: Names = field(init=False)
    modules: dict[str, ModuleSurvival] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = Names(self.stored.names)


def measure(spec: SurvivalSpec, *, report: Callable[[int, int], None]) -> dict[str, AdapterSurvival]:
    """Return what each output holds of the adapter.

    It computes with one thread: several would wait for each other longer than a weight takes, and an output is computed beside it.

    Args:
        spec: What is compared.
        report: Called with the modules that are done, and all.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(spec, report=report)
    finally:
        torch.set_num_threads(threads)


def _measure(spec: SurvivalSpec, *, report: Callable[[int, int], None]) -> dict[str, AdapterSurvival]:
    try:
        base = ModelFolder.open(spec.base)
        modules, left_out = adapted_modules(base, spec.adapter)
        weights = BaseWeights(base)
    except (NotUnderstoodError, Unusable, ModelExportError, OSError, ValueError, RuntimeError) as error:
        return {name: AdapterSurvival(not_run=f"{error}") for name in spec.outputs}
    try:
        routers = routers_of(base, spec.adapter, modules, left_out)
    except _FAULTS:  # the adapted modules are compared all the same
        routers = []
    findings: dict[str, AdapterSurvival] = {}
    opened: dict[str, _Output] = {}
    for name, folder in spec.outputs.items():
        try:
            stored = open_stored(folder, spec.base, weights.rows, runtime_of_output(name))
            opened[name] = _Output(stored, spec.largest_errors.get(name, math.inf), folder)
        except _FAULTS as error:
            findings[name] = AdapterSurvival(not_run=_describe_error(error))
    chosen = modules[:: max(1, math.ceil(len(modules) / MOST_MODULES))]
    for number, module in enumerate(chosen):
        report(number, len(chosen))
        _compare(module, weights, opened, left_out)
    for name, output in opened.items():
        try:
            found = _survival(output, chosen, weights, left_out)
            findings[name] = found.model_copy(update={"rounded_routers": _rounded_routers(output, routers, weights)})
        except _FAULTS as error:
            findings[name] = AdapterSurvival(not_run=_describe_error(error))
    report(len(chosen), len(chosen))
    return findings


def _survival(
    output: _Output, modules: list[Adapted], weights: BaseWeights, left_out: Mapping[str, str]
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
        non_finite=_new_non_finite(output, weights),
        not_run="" if kept else next(iter(without.values()), "no module is adapted"),
    )


def _rounded_routers(output: _Output, routers: Sequence[Adapted], weights: BaseWeights) -> tuple[str, ...]:
    """Return the routers that an output stores more coarsely than in 16 bits; what cannot be read is no fault here."""
    asked, rounded = rounded_on_request(output.folder), []
    for router in routers:
        if is_one_of(router, asked):
            continue
        try:
            own, sums, coded = weights.original(router), Sums(), False
            weight = _find_stored(output, router, own.shape)
            for rows in _pieces(own.shape, MOST_VALUES):
                stored = weight.take(rows)
                coded |= any(each is not None for each in (stored.scales, stored.levels, stored.grid))
                sums += Sums.of(own.rows(rows), stored.values)
        except _FAULTS:
            continue
        if is_rounded(sums.figures().weight_error, coded=coded):
            rounded.append(router.name)
    return tuple(rounded)


def _new_non_finite(output: _Output, weights: BaseWeights) -> dict[str, int]:
    """Return the output's tensors with NaN or infinity; not those that the base has like that, such as a stored mask."""
    counts = output.stored.non_finite()
    known = weights.non_finite() if counts else {}
    return {name: count for name, count in counts.items() if known.get(name) != count}


def _describe_error(error: Exception) -> str:
    return (
        str(error) if isinstance(error, NotUnderstoodError | ModelExportError) else f"{type(error).__name__}: {error}"
    )


def open_stored(folder: Path, model: Path, rows: Callable[[str], int], runtime: Runtime | None) -> StoredModel:
    """Open the weights that an output stores.

    Args:
        folder: Its folder.
        model: Folder of a model of the same architecture.
        rows: Function that returns the number of output features of a weight of that model; 0 if it has none of this name.
        runtime: The runtime of its format.

    Raises:
        NotUnderstoodError: They are in no known form; reading them may raise others (``OSError``, ``ValueError``, ``ModelExportError``).
    """
    if runtime is not None and runtime.stored:
        module, _, name = runtime.stored.partition(":")
        try:
            stored: StoredModel = getattr(import_module(module), name)(folder, model, rows)
        except ImportError as error:
            raise NotUnderstoodError(f"its weights cannot be read here: pip install {error.name}") from error
        return stored
    if any(folder.glob("*.onnx")) or (folder / "onnx-layered").is_dir():
        try:
            from slipway_validate.runner.survival.graphs import Graphs
        except ImportError as error:
            raise NotUnderstoodError(f"graphs cannot be read here: pip install {error.name}") from error
        return Graphs(folder, rows)
    if any(folder.glob("*.safetensors")):
        return Checkpoint(read_weights(folder))
    raise NotUnderstoodError("its weights lie neither in safetensors nor in an ONNX graph, and others are not read")


def _compare(module: Adapted, weights: BaseWeights, outputs: Mapping[str, _Output], left_out: dict[str, str]) -> None:
    """Compare one module in every output, a piece at a time."""
    try:
        own = weights.original(module)
    except _FAULTS as error:
        left_out[module.name] = str(error)
        return
    readings = {name: _Reading() for name in outputs}
    expected = Sums()
    for rows in _pieces(own.shape, MOST_VALUES):
        both = own.rows(rows)
        if own.rounds:
            expected += Sums.of(both, own.round_to_type(both))
        for name, output in outputs.items():
            if name in readings:
                try:
                    readings[name].add(both, readings[name].weight or _find_stored(output, module, own.shape), rows)
                except _FAULTS as error:
                    del readings[name]
                    output.left_out[module.name] = _describe_error(error)
    strength = expected.figures().strength
    for name, each in readings.items():
        survival = ModuleSurvival(
            module=module.name,
            layer=_layer(module.name),
            changed=each.changed / max(1, each.sums.count),
            expected=1.0 if strength is None else strength,
            **asdict(each.sums.figures()),
        )
        output = outputs[name]
        is_off = _is_off(survival) or (survival.weight_error or 0.0) > output.largest_error
        try:
            nearest = _nearest(own, each.weight) if each.weight and is_off else {}
        except _FAULTS as error:
            output.left_out[module.name] = _describe_error(error)
        else:
            output.modules[module.name] = survival.model_copy(update=nearest)


def _is_off(module: ModuleSurvival) -> bool:
    """Return whether a module's strength is further from what is expected than noise explains."""
    if module.strength is None or module.noise is None:
        return False
    return abs(module.expected - module.strength) > OFF + SURE * module.noise


def _nearest(own: Original, weight: StoredWeight) -> dict[str, float | None]:
    """Round W + Δ to the nearest on a stored weight's own grid; return what that holds of Δ, and its error."""
    sums = Sums()
    for rows in _pieces(own.shape, MOST_VALUES):
        both = own.rows(rows)
        sums += Sums.of(both, weight.take(rows).nearest(own.round_to_type(both)))
    figures = sums.figures()
    return {"nearest_strength": figures.strength, "nearest_error": figures.weight_error}


@dataclass(slots=True)
class _Reading:
    """What an output stores of a module, as far as it is read.

    Attributes:
        weight: Its weight; None before the first piece.
        sums: Of the values.
        changed: Stored codes or values that differ from those of W.
    """

    weight: StoredWeight | None = None
    sums: Sums = field(default_factory=Sums)
    changed: int = 0

    def add(self, both: Both, weight: StoredWeight, rows: slice) -> None:
        """Read and compare some rows."""
        self.weight = weight
        stored = weight.take(rows)
        self.sums += Sums.of(both, stored.values)
        self.changed += stored.changed_from(both.before)


def _find_stored(output: _Output, module: Adapted, shape: tuple[int, ...]) -> StoredWeight:
    name = find_name(output.names, module)
    if name is None:
        raise NotUnderstoodError("the output has no weight of this name")
    weight = output.stored.weight(name, turned=module.turned)
    if weight.shape != shape:
        raise NotUnderstoodError(f"the output has it in another shape: {weight.shape} instead of {shape}")
    return weight


def _step(shape: tuple[int, ...], most: int) -> int:
    return max(1, math.ceil(math.prod(shape) / most))


def _pieces(shape: tuple[int, ...], most: int) -> Iterator[slice]:
    """Divide the rows that are compared into pieces."""
    count, columns = shape
    step = _step(shape, most)
    length = step * max(1, PIECE // max(1, columns))
    for start in range(0, count, length):
        yield slice(start, min(start + length, count), step)


def _layer(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _name_strangers(output: _Output, modules: list[Adapted], weights: BaseWeights) -> None:
    """Find the modules whose weight or update lies in the place of another's."""
    strange = {each.module for each in output.modules.values() if _is_strange(each)}
    kinds: dict[tuple[object, ...], list[Adapted]] = {}
    for module in modules:
        kinds.setdefault(_kind(module.name), []).append(module)
    for alike in kinds.values():
        suspects = [module for module in alike if module.name in strange]
        if suspects and len(alike) > 1:
            _compare_with_others(output, suspects[: max(1, MOST_PAIRS // len(alike))], alike, weights)


def _is_strange(module: ModuleSurvival) -> bool:
    """Return whether something else may lie where a module's weight belongs; the base's own values do not count."""
    if module.changed == 0:
        return False
    other = module.weight_error is not None and module.weight_error > STRANGE_WEIGHT
    return other or (module.strength is not None and module.off_by > PRESENT)


def _kind(name: str) -> tuple[object, ...]:
    """Return a key that modules with the same task in different layers share."""
    return tuple("#" if part.isdigit() else part for part in name.split("."))


def _compare_with_others(output: _Output, suspects: list[Adapted], alike: list[Adapted], weights: BaseWeights) -> None:
    own: dict[str, tuple[Both, Tensor]] = {}
    for module in suspects:
        both, rows, shape = _sample_rows(module, weights)
        own[module.name] = both, _find_stored(output, module, shape).take(rows).values
    for other in alike:
        try:
            theirs = own[other.name][0] if other.name in own else _sample_rows(other, weights)[0]
        except NotUnderstoodError:
            continue
        for name, (both, stored) in own.items():
            if name != other.name and stored.shape == theirs.after.shape:
                key = _find_other(both, stored, theirs)
                if key:
                    output.modules[name] = output.modules[name].model_copy(update={key: other.name})


def _sample_rows(module: Adapted, weights: BaseWeights) -> tuple[Both, slice, tuple[int, ...]]:
    """Return the rows of a module that are compared with other modules', their slice, and the shape of the whole weight."""
    whole = weights.original(module)
    rows = slice(None, None, _step(whole.shape, MOST_COMPARED))
    return whole.rows(rows), rows, whole.shape


def _find_other(own: Both, stored: Tensor, other: Both) -> str:
    """Return the field for what is stored of another module: its weight, or its update on the module's own weight; empty for neither."""
    error = Sums.of(other, stored).figures().weight_error
    if error is not None and error < PRESENT:
        return "weight_of"
    moved = Sums.of(own.with_update_of(other), stored).figures()
    strength, noise = moved.strength, moved.noise
    there = strength is not None and noise is not None and abs(strength - 1) < PRESENT - 4 * noise
    return "update_of" if there else ""
