"""The configuration of an export, and checks for settings that contradict each other or need a warning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from slipway.configuration.calibration import AUTO, WITHOUT_DATA, calibrated_levels, may_read_text
from slipway.configuration.sections import Sections
from slipway.formats.contract import Format
from slipway.formats.registry import formats, refused_formats, translate_format_errors
from slipway.formats.settings import LevelSettings
from slipway.levels import widths_of
from slipway.settings.problems import Problem
from slipway.texts import counted


class ExportConfiguration(Sections):
    """The configuration of an export: its checkpoint and base model, its formats, its validation and its output folder."""

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        problems = conflicts(self)
        if problems:
            raise PydanticCustomError(
                "conflict", "{text}", {"text": "; ".join(str(problem) for problem in problems), "problems": problems}
            )
        return self


def conflicts(configuration: Sections) -> tuple[Problem, ...]:
    """Return the settings that contradict each other, each with a remedy."""
    return (
        *_no_format(configuration),
        *_nf4_without_4bit(configuration),
        *_levels_of_formats_that_are_off(configuration),
        *_refused_levels(configuration),
        *_budget_of_dense_weights(configuration),
        *_formats_without_output(configuration),
        *_conflicts_of_formats(configuration),
        *_wrong_number_of_weights(configuration),
    )


def cautions(configuration: Sections) -> tuple[str, ...]:
    """Return warnings about valid settings whose effect may surprise."""
    warnings = [str(each.error()) for each in refused_formats()]
    if configuration.base_model.load_in_4bit and configuration.base_model.merge_onto == "original":
        warnings.append(
            "base_model.load_in_4bit: the adapter is merged into the 16-bit weights, not into the 4-bit ones it saw in training; "
            "base_model.merge_onto: nf4 merges onto those"
        )
    if configuration.optimization.calibration and not may_read_text(configuration):
        why = (
            "no level is calibrated"
            if configuration.optimization.method != WITHOUT_DATA
            else "method: rtn takes no data"
        )
        warnings.append(f"optimization.calibration is not applied: {why}")
    warnings += _find_unused_calibration(configuration)
    if configuration.optimization.size_budget and not any(
        len(widths_of(level)) > 1
        for each, _ in configuration.formats.enabled()
        for level in configuration.levels(each.name)
    ):
        warnings.append("optimization.size_budget is not applied: no level of 4 bits is requested")
    with_levels = [
        name
        for name, each in formats().items()
        if each.levels and each.settings.model_fields["quantization"].default is None
    ]
    if configuration.optimization.quantization and not any(configuration.formats[name].enabled for name in with_levels):
        warnings.append(
            f"optimization.quantization is not applied: only {' and '.join(with_levels)} can be quantized, "
            "and none of these formats is enabled"
        )
    validation = configuration.validation
    compared = validation.enabled and validation.compare_outputs
    unused = [] if compared else ["limits", "test_input_samples", "continuation_tokens"]
    warnings += [
        f"validation.{name} is not applied: outputs are compared only if validation.enabled and compare_outputs are true"
        for name in unused
        if getattr(validation, name)
    ]
    if validation.on_failure == "keep" and not compared:
        warnings.append(
            f"validation.on_failure: {validation.on_failure} does nothing: outputs are judged only if validation.enabled and "
            "compare_outputs are true"
        )
    if not configuration.validation.enabled:
        warnings.append("validation.enabled is false: nothing shows that the outputs behave like the fine-tuned model")
    wanted = configuration.optimization.group_size
    for each, section in configuration.formats.enabled():
        if configuration.levels(each.name) and (size := each.group_size(wanted)) != wanted:
            warnings.append(
                f"optimization.group_size: {each.name} has no groups of {wanted} weights, and gets groups of {size}"
            )
        with translate_format_errors(each):
            warnings += each.rules.cautions(section)
    return (*warnings, *_find_unfit_outputs(configuration))


def _find_unfit_outputs(configuration: Sections) -> Iterable[str]:
    """Yield the outputs that are unfit for the target."""
    target = configuration.output.target
    for each, section in configuration.formats.enabled() if target else ():
        fit = {kind for one in each.fits if one.target == target for kind in one.kinds}
        with translate_format_errors(each):
            unquantized = [""] if configuration.unquantized(each.name) and each.variants.plain(section) else []
            variants = tuple(each.variants.names(section))
        for level in [*unquantized, *configuration.levels(each.name), *variants]:
            if level not in fit:
                how = f"; {_join_levels(sorted(fit))} of this format fits" if fit else ", as no level of this format is"
                yield f"{each.output_name(level)} is not known to be fit for output.target {target}{how}; see slipway recommend --target {target}"


def _join_levels(levels: list[str]) -> str:
    return " or ".join(level or "the unquantized output" for level in levels)


def _find_unused_calibration(configuration: Sections) -> Iterable[str]:
    """Yield the settings of calibration that have no effect because no level is calibrated."""
    optimization = configuration.optimization
    if calibrated_levels(configuration) or optimization.method in (None, WITHOUT_DATA):
        return
    if optimization.method != AUTO:
        yield f"optimization.method: {optimization.method} is not applied: no integer level is requested"


def _nf4_without_4bit(configuration: Sections) -> list[Problem]:
    base = configuration.base_model
    if base.merge_onto == "original" or base.load_in_4bit:
        return []
    return [
        Problem(
            "base_model.merge_onto",
            "nf4 is for adapters that were trained with load_in_4bit, which is false",
            remedy="set base_model.load_in_4bit to true if the adapter was trained on the 4-bit base; otherwise set merge_onto to original",
        )
    ]


def _budget_of_dense_weights(configuration: Sections) -> list[Problem]:
    if not configuration.optimization.size_budget or configuration.optimization.compress_weights:
        return []
    fault = "has no effect on weights that are stored dense: compress_weights is false"
    return [Problem("optimization.size_budget", fault, "set optimization.compress_weights to true")]


def _no_format(configuration: Sections) -> list[Problem]:
    if any(configuration.formats.enabled()):
        return []
    first = next(iter(formats()))
    return [
        Problem("formats", "no format is enabled, so there is nothing to deliver", f"set formats.{first}.enabled: true")
    ]


def _levels_of_formats_that_are_off(configuration: Sections) -> Iterable[Problem]:
    """Yield the formats that are asked for a level and are not made."""
    for name in formats():
        section = configuration.formats[name]
        if section.enabled or not isinstance(section, LevelSettings) or not section.quantization:
            continue
        levels = ", ".join(section.quantization)
        yield Problem(
            f"formats.{name}.quantization",
            f"{levels} {'is' if len(section.quantization) == 1 else 'are'} asked for, and the format {name} is off",
            f"set formats.{name}.enabled: true, or export with -f {name}:{'+'.join(section.quantization)}, or leave the level out",
        )


def _refused_levels(configuration: Sections) -> Iterable[Problem]:
    """Yield one problem per requested level that an enabled format does not have."""
    for each, section in configuration.formats.enabled():
        asked = configuration.levels(each.name)
        kept = [level for level in asked if level in each.levels]
        own = isinstance(section, LevelSettings) and section.quantization is not None
        key = f"formats.{each.name}.quantization"
        for level in asked:
            if level in each.levels:
                continue
            instead, why = _nearest_level(each, level)
            works = ", ".join(dict.fromkeys([instead, *kept]))
            remedy = f"set {key}: [{works}]" + ("" if own else f" and the others keep {level}")
            yield Problem(
                key if own else "optimization.quantization", f"{level} is not delivered as {each.name}{why}", remedy
            )


def _nearest_level(each: Format[Any], level: str) -> tuple[str, str]:
    """Return the format's nearest level to one it lacks, and the reason it lacks it, worded as the end of a sentence."""
    refused = each.quantization.refused.get(level)
    return (
        (refused.instead, f": {refused.why}") if refused else (each.levels[0], f", which has {', '.join(each.levels)}")
    )


def _formats_without_output(configuration: Sections) -> Iterable[Problem]:
    for each, _ in configuration.formats.enabled():
        if not configuration.unquantized(each.name) and not configuration.levels(each.name):
            yield Problem(
                f"formats.{each.name}.unquantized",
                "is false, and no quantization level is requested, so there is nothing to deliver",
                f"name levels in formats.{each.name}.quantization, or set formats.{each.name}.enabled: false",
            )


def _conflicts_of_formats(configuration: Sections) -> Iterable[Problem]:
    for each, section in configuration.formats.enabled():
        with translate_format_errors(each):
            problems = [
                replace(problem, key=f"formats.{each.name}.{problem.key}") for problem in each.rules.conflicts(section)
            ]
        yield from problems


def _wrong_number_of_weights(configuration: Sections) -> list[Problem]:
    combination = configuration.combination
    count = len(combination.adapters) + 1 if combination.adapters else 0
    if not combination.weights or len(combination.weights) == count:
        return []
    given, ones = len(combination.weights), ", ".join(["1.0"] * count)
    return [
        Problem(
            "combination.weights",
            f"there {'is' if given == 1 else 'are'} {counted(given, 'weight')} "
            f"for {counted(count, 'adapter') if count else 'no adapters'} to combine, "
            "including the checkpoint's",
            f"set combination.weights: [{ones}]" if count else "name the other adapters in combination.adapters",
        )
    ]
