"""Judge what an output holds of the adapter, module by module, and say which modules fail."""

from __future__ import annotations

from collections.abc import Sequence

from slipway.texts import counted
from slipway.validation.comparisons import Check
from slipway.validation.survival import AdapterSurvival, ModuleSurvival, worst
from slipway.validation.verdicts import Limits

SURE = 4.0
"""Standard errors by which rounding alone may move a strength."""
LOST = 0.5
"""Strength below which a module has lost its update. If rounding may move it that far, the module is not judged."""
WEAK = 0.9
"""Share of an update below which a note says that the base's own type, or the output's grid, holds no more of it."""
NON_FINITE, STRENGTH, WEIGHT = "non_finite_weights", "module_strength_error", "module_weight_error"
ROUTERS = "rounded_routers"
CHECKS = frozenset({NON_FINITE, STRENGTH, WEIGHT, ROUTERS})
_SHOWN = 4
_OTHER_WEIGHT = "holds a weight that is"
_OF_ANOTHER_BASE = 0.5
"""Share of the modules with other weights, from which the base as a whole is another."""
_SAME = 0.02
"""Largest difference between two strengths that are shown as one."""
_ALIKE = 0.05
"""Largest difference of the modules' strengths, relative to them, at which one scale is wrong for all."""


def add_faults(survival: AdapterSurvival, limits: Limits) -> AdapterSurvival:
    """Add the fault of each module that fails to the findings."""
    modules = tuple(each.model_copy(update={"fault": _find_fault(each, limits)}) for each in survival.modules)
    return survival.model_copy(update={"modules": modules})


def checks(survival: AdapterSurvival, limits: Limits) -> list[Check]:
    """Return the checks of an output's modules: the worst of them against each limit."""
    if survival.not_run and not survival.non_finite and not survival.rounded_routers:
        return []
    results = [_at_most(NON_FINITE, float(sum(survival.non_finite.values())), 0.0, "count")]
    if survival.rounded_routers:
        results.append(_at_most(ROUTERS, float(len(survival.rounded_routers)), 0.0, "count"))
    errors = [max(0.0, each.error - SURE * each.noise) for each in map(_Strength, survival.modules) if each]
    if errors and limits.module_strength_error is not None:
        results.append(_at_most(STRENGTH, max(errors), limits.module_strength_error, "share"))
    weights = [error for each in survival.modules if (error := each.unexplained_error) is not None]
    if weights and limits.module_weight_error is not None:
        results.append(_at_most(WEIGHT, max(weights), limits.module_weight_error, "share"))
    return results


def notes(survival: AdapterSurvival | None, limits: Limits) -> tuple[str, ...]:
    """Return remarks on what was not compared or judged, and on what rounding explains. Call :func:`add_faults` before."""
    if survival is None:
        return ()
    if survival.not_run:
        return (f"the adapter in its stored weights was not compared: {survival.not_run}",)
    remarks = []
    if survival.left_out:
        first, why = next(iter(survival.left_out.items()))
        remarks.append(f"{counted(len(survival.left_out), 'adapted module')} not compared, first {first}: {why}")
    coarse = [each for each in survival.modules if each.expected < WEAK]
    if coarse:
        least = min(coarse, key=lambda each: each.expected)
        remarks.append(
            f"in {counted(len(coarse), 'module')} the update is smaller than the steps of the base's 16-bit type, which holds only "
            f"{least.expected:.2f} of it in {least.module}: a base in float32 keeps all of it"
        )
    moved = [each for each in survival.modules if _rounding_shift(each) > (1 - WEAK) * each.expected]
    if moved:
        most = max(moved, key=_rounding_shift)
        remarks.append(
            f"in {counted(len(moved), 'module')} the base's weights lie on a grid, so rounding changes small updates: "
            f"{most.module} holds {most.strength or 0.0:.2f} of its update, and a wider level holds all of it"
        )
    far = [each for each in survival.modules if not each.fault and _is_far(each.weight_error, limits)]
    if far:
        most = max(far, key=lambda each: each.weight_error or 0.0)
        remarks.append(
            f"in {counted(len(far), 'module')} the output's grid is coarse: the weight of {most.module} is {most.weight_error:.2g} of its size away"
        )
    small = [each for each in survival.modules if each.strength is not None and not _Strength(each)]
    if small:
        remarks.append(
            f"in {counted(len(small), 'module')} the adapter's update is too small beside the rounding to be judged, "
            f"first {small[0].module}"
        )
    return tuple(remarks)


def _is_far(error: float | None, limits: Limits) -> bool:
    return limits.module_weight_error is not None and (error or 0.0) > limits.module_weight_error


def _rounding_shift(each: ModuleSurvival) -> float:
    """Return how far rounding alone moves a module's strength; 0 if noise explains it."""
    moved = 0.0 if each.nearest_strength is None else abs(each.nearest_strength - each.expected)
    return moved if moved > SURE * (each.noise or 0.0) else 0.0


def explain(survival: AdapterSurvival) -> tuple[str, str]:
    """Return which modules fail and what to do; both empty if none does."""
    said, remedy = [], ""
    if survival.non_finite:
        first, count = next(iter(survival.non_finite.items()))
        more = f", and so have {counted(len(survival.non_finite) - 1, 'other')}" if len(survival.non_finite) > 1 else ""
        said.append(f"the stored weight {first} has {counted(count, 'NaN or infinite value')}{more}")
        remedy = "check base and adapter for NaN; use an earlier checkpoint, or bf16 in place of fp16"
    faulty = survival.faulty
    if faulty:
        said.append(_describe_faulty(faulty, survival.modules))
        remedy = (
            remedy
            or "merge again onto this base, and make this format from the merged model; report.json has every module"
        )
    if survival.rounded_routers:
        said.append(_describe_routers(survival.rounded_routers))
        remedy = (
            remedy or "quantize it again with its routers in 16 bits, as every level does unless keep says otherwise"
        )
    return "; ".join(said), remedy


def _describe_routers(routers: Sequence[str]) -> str:
    others = (
        f", and so {'is' if len(routers) == 2 else 'are'} {counted(len(routers) - 1, 'other')}" if routers[1:] else ""
    )
    return f"the router {routers[0]}, which chooses the experts of each token, is rounded below 16 bits{others}"


def _describe_faulty(faulty: Sequence[ModuleSurvival], every: Sequence[ModuleSurvival]) -> str:
    lost = [each for each in faulty if each.strength is not None and each.strength < LOST]
    if len(lost) == len(every) and not any(each.exchanged for each in lost):
        return f"none of {counted(len(every), 'adapted module')} holds the adapter"
    other = [each for each in faulty if each.fault.startswith(_OTHER_WEIGHT)]
    if len(other) > len(every) * _OF_ANOTHER_BASE:
        return (
            f"it was made of another base of the same shapes, or rounded more coarsely than its type: {len(other)} of "
            f"{counted(len(every), 'adapted module')} hold other weights than this base with the update, first {worst(other, 1)[0].module}"
        )
    held = [_Strength(each) for each in every]
    if len(faulty) == len(every) > 1 and all(held) and not any(each.weight_of or each.update_of for each in faulty):
        strengths = sorted(known.strength / (each.expected or 1.0) for known, each in zip(held, every, strict=True))
        middle = strengths[len(strengths) // 2]
        if strengths[-1] - strengths[0] <= _ALIKE * abs(middle):
            return f"the scale is wrong: all {counted(len(every), 'adapted module')} hold {middle:.2f} of their update"
    whole = _whole_layers(lost, every)
    said = [
        f"layer {number} has lost the adapter in {counted(len(modules), 'module')}" for number, modules in whole.items()
    ]
    others = [each for each in faulty if each.layer not in whole]
    said += [f"{each.module} {each.fault}" for each in worst(others, _SHOWN)]
    shown = said[: 2 * _SHOWN]
    left = len(said) - len(shown) + max(0, len(others) - _SHOWN)
    return "; ".join([*shown, *([f"and {left} more"] if left else [])])


def _whole_layers(
    lost: Sequence[ModuleSurvival], every: Sequence[ModuleSurvival]
) -> dict[int, tuple[ModuleSurvival, ...]]:
    """Return the layers in which every module has lost its update, and nothing else lies in its place."""
    gone = {each.module for each in lost if not each.exchanged}
    layers = AdapterSurvival(modules=tuple(every)).by_layer()
    return {
        number: modules
        for number, modules in layers.items()
        if len(modules) > 1 and all(each.module in gone for each in modules)
    }


def _find_fault(each: ModuleSurvival, limits: Limits) -> str:
    if each.weight_of:
        return f"holds the weight of {each.weight_of}"
    if each.update_of:
        return f"holds the update of {each.update_of}"
    known, limit = _Strength(each), limits.module_strength_error
    if known and limit is not None and known.error > limit + SURE * known.noise:
        lost = "has lost the adapter: it holds" if known.strength < LOST else "holds"
        ends = {each.expected, each.nearest_strength or 0.0} if _rounding_shift(each) > _SAME else {each.expected}
        wanted = " to ".join(f"{end:.3g}" for end in sorted(ends))
        return f"{lost} {known.strength:.2f} of its update instead of {wanted}"
    if _is_far(each.unexplained_error, limits):
        return f"{_OTHER_WEIGHT} {each.weight_error:.2g} of its size away"
    return ""


class _Strength:
    """A module's strength; false if there is none, or if rounding hides it."""

    def __init__(self, each: ModuleSurvival) -> None:
        self._known = each.strength is not None and each.noise is not None and SURE * each.noise <= LOST
        self.strength, self.noise = each.strength or 0.0, each.noise or 0.0
        self.error = each.off_by

    def __bool__(self) -> bool:
        return self._known


def _at_most(name: str, value: float, limit: float, unit: str) -> Check:
    return Check(name=name, value=value, limit=limit, comparison="<=", passed=value <= limit, unit=unit)
