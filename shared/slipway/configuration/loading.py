"""Combine the sources of a configuration, and check everything at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError as PydanticError

from slipway.configuration.export import ExportConfiguration, cautions
from slipway.configuration.flags import read_flags
from slipway.configuration.layers import (
    MOST_PROBLEMS,
    Layer,
    Setting,
    put_setting,
    read_data,
    read_environment,
    read_yaml,
)
from slipway.configuration.schema import default, is_table, keys, sections, unknown_setting
from slipway.configuration.values import is_none
from slipway.files.paths import has_unknown_home, is_address, user_path
from slipway.formats.registry import formats
from slipway.settings.problems import Problem, configuration_error, did_you_mean
from slipway.texts import quoted

PATH_KEYS = (
    "checkpoint.path",
    "combination.adapters",
    "optimization.calibration",
    "validation.heldout",
    "validation.test_input_samples",
    "output.directory",
)
"""Settings that are paths or lists of paths. A relative path in the YAML file starts at the file's folder, any other at the current one."""
_BASE = "base_model.name"
"""It is a path if it looks like one, or if there is such a folder."""
_CHOSEN = "output.target:"
"""Beginning of the source of formats that were chosen for a target, and of warnings about the choice."""


@dataclass(frozen=True)
class LoadedConfiguration:
    """A valid configuration.

    Attributes:
        configuration: The settings, with absolute paths.
        origins: Source of each setting by its dotted key; ``default`` if no source gives it.
        warnings: Texts about ignored settings, and about settings whose effect may surprise.
    """

    configuration: ExportConfiguration
    origins: Mapping[str, str]
    warnings: tuple[str, ...]


Given = Path | Mapping[str, Any] | ExportConfiguration | LoadedConfiguration
"""A YAML file, or its contents in another form: nested plain data as below ``export:``, or a configuration."""


def load(
    path: Given | None,
    *,
    environment: Mapping[str, str],
    flags: Mapping[str, str | None] | None = None,
    assignments: Sequence[str] | Mapping[str, Any] = (),
    requested: Sequence[str] = (),
    folder: Path | None = None,
    choose: Callable[[Mapping[str, Setting]], Layer] | None = None,
) -> LoadedConfiguration:
    """Read the YAML file, then ``EXPORT_*``, then flags; for each setting, the last source wins.

    Args:
        path: The YAML file, or its contents; None reads none.
        environment: Usually ``os.environ``.
        flags: Texts of ``--base-model``, ``--checkpoint``, ``--target`` and ``--out``; None if not given.
        assignments: Texts of ``--set``, or values by setting.
        requested: Texts of ``-f``: the formats to make, in place of those of the other sources.
        folder: Start of relative paths in variables, flags and defaults; the current folder by default.
        choose: Function that returns the settings of formats for ``output.target``, given all settings; called where none names a format.

    Raises:
        ConfigurationError: All problems at once, or ``CONFIGURATION_NOT_FOUND``.
    """
    here = (folder or Path.cwd()).resolve()
    if path is None:
        from_file = Layer()
    elif isinstance(path, Path):
        from_file = read_yaml(path)
    else:
        from_file = _read_given(path, choosing=choose is not None)
    layers = [from_file, read_environment(environment), read_flags(flags or {}, assignments, requested=requested)]
    _make_paths_absolute(from_file, path.resolve().parent if isinstance(path, Path) else here)
    for layer in layers[1:]:
        _make_paths_absolute(layer, here)
    settings: dict[str, Setting] = {"output.directory": Setting(str(here / default("output.directory")), "default")}
    for layer in layers:
        for key in (*layer.replaced, *_levels_of_formats_turned_off(layer)):
            settings.pop(key, None)
        for key, setting in layer.settings.items():
            put_setting(settings, key, setting)
    if choose is not None and "output.target" in settings and not _names_a_format(settings):
        layers.insert(0, choose(settings))
        settings = {**layers[0].settings, **settings}
    problems = [problem for layer in layers for problem in layer.problems]
    broken = {key for layer in layers for key in layer.broken}
    problems += _find_problems_without_checkpoint(settings, broken)
    configuration, faults = _check(settings, broken)
    problems += faults
    if problems or configuration is None:
        raise configuration_error(problems)
    origins = {key: settings[key].source if key in settings else "default" for key in keys()}
    warnings = [warning for layer in layers for warning in layer.warnings]
    return LoadedConfiguration(configuration, origins, (*warnings, *cautions(configuration)))


def _read_given(given: Mapping[str, Any] | ExportConfiguration | LoadedConfiguration, *, choosing: bool) -> Layer:
    """Return what a configuration sets itself, without defaults, or what is in nested plain data.

    Args:
        given: The configuration or the data.
        choosing: Leave out the formats that were chosen for the target of a loaded configuration: they are chosen again.
    """
    if not isinstance(given, ExportConfiguration | LoadedConfiguration):
        return read_data(given)
    loaded = given if isinstance(given, LoadedConfiguration) else LoadedConfiguration(given, {}, ())
    layer = read_data(loaded.configuration.model_dump(mode="json", exclude_unset=True))
    old = cautions(loaded.configuration)
    layer.warnings = [warning for warning in loaded.warnings if warning not in old]  # others follow from the result
    for key, setting in layer.settings.items():
        layer.settings[key] = replace(setting, source=loaded.origins.get(key, setting.source))
    if choosing:
        layer.settings = {key: each for key, each in layer.settings.items() if not each.source.startswith(_CHOSEN)}
        layer.warnings = [warning for warning in layer.warnings if not warning.startswith(_CHOSEN)]
    return layer


def _levels_of_formats_turned_off(layer: Layer) -> Iterator[str]:
    """Yield the settings with the levels of formats that this source turns off: levels from earlier sources no longer count."""
    for name in formats():
        enabled = layer.settings.get(f"formats.{name}.enabled")
        if enabled is not None and enabled.value is False:
            yield f"formats.{name}.quantization"


def _names_a_format(settings: Mapping[str, Setting]) -> bool:
    """Return whether a setting asks for a format, or for a level of one."""
    asked = (settings.get(f"formats.{name}.{key}") for name in formats() for key in ("enabled", "quantization"))
    return any(setting is not None and setting.value for setting in asked)


def parse(data: Mapping[str, Any], *, source: str = "") -> ExportConfiguration:
    """Make a configuration from nested plain data, such as a message from the network.

    Raises:
        ConfigurationError: All problems at once.
    """
    settings: dict[str, Setting] = {}
    problems: list[Problem] = []
    _flatten(data, "", source, settings, problems)
    configuration, faults = _check(settings, set())
    problems += faults
    if problems or configuration is None:
        raise configuration_error(problems)
    return configuration


def _find_problems_without_checkpoint(settings: Mapping[str, Setting], broken: set[str]) -> list[Problem]:
    """Find settings that are missing or make no sense without a checkpoint, when a model is exported as it is."""

    def is_set(key: str) -> bool:
        value = settings[key].value if key in settings else None
        return key in broken or (bool(value) and not (isinstance(value, str) and is_none(value)))

    if is_set("checkpoint.path"):
        return []
    if not is_set("base_model.name"):
        remedy = (
            "set checkpoint.path, EXPORT_CHECKPOINT_PATH or --checkpoint to the folder of a training run; or, to export a model as "
            "it is, set base_model.name, EXPORT_BASE_MODEL or --base-model to it"
        )
        return [Problem("checkpoint.path", "is needed, because base_model.name is not set either", remedy)]
    problems = []
    if is_set("combination.adapters"):
        what = "join the adapter of checkpoint.path, which is not set"
        problems.append(Problem("combination.adapters", what, "set checkpoint.path to the first of the adapters"))
    if "base_model.merge_onto" in settings and settings["base_model.merge_onto"].value == "nf4":
        what = "nf4 is a base for an adapter to be merged onto, and checkpoint.path is not set"
        problems.append(
            Problem("base_model.merge_onto", what, "set base_model.merge_onto to original, or checkpoint.path")
        )
    return problems


def _flatten(
    data: Mapping[str, Any], path: str, source: str, settings: dict[str, Setting], problems: list[Problem]
) -> None:
    for name, value in data.items():
        key = f"{path}.{name}" if path else str(name)
        if key in keys():
            settings[key] = Setting(value, source)
        elif key in sections() and isinstance(value, Mapping):
            _flatten(value, key, source, settings, problems)
        elif key in sections():
            problems.append(
                Problem(key, f"{quoted(value)} is not a section", f"it holds {', '.join(sections()[key])}", source)
            )
        else:
            problems.append(unknown_setting(key, did_you_mean(str(name), sections()[path]), source))


def _make_paths_absolute(layer: Layer, folder: Path) -> None:
    """Make a layer's relative paths absolute."""
    for key in (*PATH_KEYS, _BASE):
        setting = layer.settings.get(key)
        paths = setting.value if setting and isinstance(setting.value, list) else [setting.value] if setting else []
        if setting is None or not all(isinstance(path, str) for path in paths):
            continue  # the check of all settings refuses other types
        homeless = next(filter(has_unknown_home, paths), None)
        if homeless is not None:
            user = homeless.partition("/")[0]
            fault = f"{quoted(homeless)} begins with {quoted(user)}, which is not an account here"
            layer.problems.append(Problem(key, fault, "write out the path", setting.source))
            layer.broken.add(key)
            continue
        absolute = [_absolute_path(path, folder, is_base=key == _BASE) for path in paths]
        layer.settings[key] = Setting(absolute if isinstance(setting.value, list) else absolute[0], setting.source)


def _absolute_path(text: str, folder: Path, *, is_base: bool) -> str:
    """Return an absolute path; a text that is no path is unchanged, as is a base model's name without such a folder."""
    if not text or is_address(text) or text.startswith("sha256:") or (is_none(text) and not is_base):
        return text
    # Symbolic links are not resolved, so that messages and the report show the user's own names.
    path = os.path.normpath(folder / user_path(text))
    return path if not is_base or text.startswith((".", "/", "~")) or os.path.isdir(path) else text  # noqa: PTH112 - takes impossible names


def _check(settings: Mapping[str, Setting], broken: set[str]) -> tuple[ExportConfiguration | None, list[Problem]]:
    """Validate the settings; set wrong ones aside and check the rest again, so that conflicts are reported too."""
    kept = {key: setting for key, setting in settings.items() if key not in broken}
    problems: list[Problem] = []
    while True:
        try:
            return ExportConfiguration.model_validate(_nest(kept)), problems
        except PydanticError as error:
            wrong: set[str] = set()
            for details in error.errors(include_url=False)[:MOST_PROBLEMS]:
                if details["type"] == "conflict":
                    for problem in details["ctx"]["problems"]:
                        # A conflict about a value that was set aside may be gone once that is repaired.
                        if not any(f"{key}.".startswith(f"{problem.key}.") for key in broken):
                            setting = settings.get(problem.key)
                            problems.append(replace(problem, source=setting.source if setting else ""))
                    return None, problems
                key = _key(details["loc"])
                if key not in wrong or is_table(key):  # for a list, the first problem is enough
                    problems.append(_problem(key, details, settings))
                wrong.add(key)
            broken = broken | wrong
            kept = {key: setting for key, setting in kept.items() if key not in wrong}


def _nest(settings: Mapping[str, Setting]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, setting in settings.items():
        *path, name = key.split(".")
        section = root
        for part in path:
            section = section.setdefault(part, {})
        section[name] = setting.value
    return root


def _key(location: tuple[int | str, ...]) -> str:
    """Return the setting that an error's location lies in; the rest of the location is a place inside its value."""
    for length in range(len(location), 0, -1):
        key = ".".join(str(part) for part in location[:length])
        if key in keys():
            return key
    return ".".join(str(part) for part in location)


_NO_TABLE = {"dict_type", "model_type", "model_attributes_type"}
_EXPECTED = {
    "bool_type": ("is neither true nor false", "use true or false without quotes"),
    "int_type": ("is not a whole number", "use digits without quotes"),
    "float_type": ("is not a number", "use digits and a point, without quotes"),
    "finite_number": ("is not a finite number", "use digits and a point"),
    "string_type": ("is not a text", "put it in quotes"),
    "string_unicode": ("is not valid Unicode", "rename the file or folder that it names, in UTF-8"),
    "tuple_type": ("is not a list", "write it like [a, b]"),
    "mapping_type": ("is not a table", "write it like {name: 60}"),
    "string_too_short": ("is empty", "give it a value"),
}


def _problem(key: str, details: Any, settings: Mapping[str, Setting]) -> Problem:
    setting, context, kind = settings.get(key), details.get("ctx", {}), details["type"]
    source = setting.source if setting else ""
    value = setting.value if setting and not is_table(key) else details["input"]
    if is_table(key):
        kind = "mapping_type" if kind in _NO_TABLE else kind
        key = ".".join(str(part) for part in details["loc"])  # the row
    if "remedy" in context:
        return Problem(key, details["msg"], context["remedy"], source)
    if kind == "literal_error":
        return Problem(key, f"{quoted(value)} is not possible", f"use {context['expected']}", source)
    if kind in {"greater_than", "greater_than_equal", "less_than_equal"}:
        word = "more" if "le" in context else "less"
        nearest = f"use more than {context['gt']:g}" if "gt" in context else "the nearest that works is {ge}{le}"
        remedy = nearest.format(ge=context.get("ge", ""), le=context.get("le", ""))
        return Problem(key, f"{quoted(value)} is {word} than allowed", remedy, source)
    if kind in _EXPECTED:
        what, remedy = _EXPECTED[kind]
        return Problem(key, f"{quoted(value)} {what}", remedy, source)
    return Problem(key, f"{quoted(value)}: {details['msg']}", "", source)
