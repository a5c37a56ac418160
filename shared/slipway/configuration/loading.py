"""Combine the sources of a configuration, and check everything at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError as PydanticError

from slipway.configuration.conflicts import cautions
from slipway.configuration.environment import read_environment
from slipway.configuration.flags import read_flags
from slipway.configuration.layers import MOST_PROBLEMS, Layer, Setting, put_setting
from slipway.configuration.model import ExportConfiguration
from slipway.configuration.schema import default, is_table, keys, sections, unknown_setting
from slipway.configuration.values import is_none
from slipway.configuration.yaml_file import read_yaml
from slipway.files.local_folders import is_address
from slipway.files.user_paths import has_unknown_home, user_path
from slipway.settings.problems import Problem, configuration_error, did_you_mean
from slipway.texts import quoted

PATH_KEYS = ("checkpoint.path", "combination.adapters", "validation.heldout", "output.directory")
"""Settings that are paths or lists of paths. A relative path in the YAML file starts at the file's folder, any other at the current one."""


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


def load(
    path: Path | None,
    *,
    environment: Mapping[str, str],
    flags: Mapping[str, str | None] | None = None,
    assignments: Sequence[str] = (),
    folder: Path | None = None,
) -> LoadedConfiguration:
    """Read the YAML file, then ``EXPORT_*``, then flags; for each setting, the last source wins.

    Args:
        path: The YAML file; None reads none.
        environment: Usually ``os.environ``.
        flags: Texts of ``--base-model``, ``--checkpoint`` and ``--out``; None if not given.
        assignments: Texts of ``--set``.
        folder: Start of relative paths in variables, flags and defaults; the current folder by default.

    Raises:
        ConfigurationError: All problems at once, or ``CONFIGURATION_NOT_FOUND``.
    """
    here = (folder or Path.cwd()).resolve()
    from_file = read_yaml(path) if path is not None else Layer()
    layers = [from_file, read_environment(environment), read_flags(flags or {}, assignments)]
    if path is not None:
        _make_paths_absolute(from_file, path.resolve().parent)
    for layer in layers[1:]:
        _make_paths_absolute(layer, here)
    settings: dict[str, Setting] = {"output.directory": Setting(str(here / default("output.directory")), "default")}
    for layer in layers:
        for key, setting in layer.settings.items():
            put_setting(settings, key, setting)
    problems = [problem for layer in layers for problem in layer.problems]
    broken = {key for layer in layers for key in layer.broken}
    problems += _without_checkpoint(settings, broken)
    configuration, found = _check(settings, broken)
    problems += found
    if problems or configuration is None:
        raise configuration_error(problems)
    origins = {key: settings[key].source if key in settings else "default" for key in keys()}
    warnings = [warning for layer in layers for warning in layer.warnings]
    return LoadedConfiguration(configuration, origins, (*warnings, *cautions(configuration)))


def parse(data: Mapping[str, Any], *, source: str = "") -> ExportConfiguration:
    """Make a configuration from nested plain data, such as a message from the network.

    Raises:
        ConfigurationError: All problems at once.
    """
    settings: dict[str, Setting] = {}
    problems: list[Problem] = []
    _flatten(data, "", source, settings, problems)
    configuration, found = _check(settings, set())
    problems += found
    if problems or configuration is None:
        raise configuration_error(problems)
    return configuration


def _without_checkpoint(settings: Mapping[str, Setting], broken: set[str]) -> list[Problem]:
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
    found = []
    if is_set("combination.adapters"):
        what = "join the adapter of checkpoint.path, which is not set"
        found.append(Problem("combination.adapters", what, "set checkpoint.path to the first of the adapters"))
    if "base_model.merge_onto" in settings and settings["base_model.merge_onto"].value == "nf4":
        what = "nf4 is a base for an adapter to be merged onto, and checkpoint.path is not set"
        found.append(
            Problem("base_model.merge_onto", what, "set base_model.merge_onto to original, or checkpoint.path")
        )
    return found


def _flatten(
    data: Mapping[str, Any], path: str, source: str, settings: dict[str, Setting], problems: list[Problem]
) -> None:
    for name, value in data.items():
        key = f"{path}.{name}" if path else name
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
    """Make a layer's relative paths absolute; a base model's name is a path only if it looks like one or such a folder exists."""
    for key in PATH_KEYS:
        setting = layer.settings.get(key)
        if setting is None:
            continue
        value = setting.value
        homeless = next((each for each in (value if isinstance(value, list) else [value]) if _is_homeless(each)), None)
        if homeless is not None:
            layer.problems.append(_no_home(key, homeless, setting.source))
            layer.broken.add(key)
            continue
        if isinstance(value, str):
            layer.settings[key] = Setting(_absolute_text(value, folder), setting.source)
        elif isinstance(value, list) and all(isinstance(path, str) for path in value):
            layer.settings[key] = Setting([_absolute_text(path, folder) for path in value], setting.source)
    base = layer.settings.get("base_model.name")
    if base is None or not isinstance(base.value, str) or not base.value:
        return
    if _is_homeless(base.value):
        layer.problems.append(_no_home("base_model.name", base.value, base.source))
        layer.broken.add("base_model.name")
        return
    if base.value.startswith((".", "/", "~")) or _is_folder(_absolute(base.value, folder)):
        layer.settings["base_model.name"] = Setting(str(_absolute(base.value, folder)), base.source)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # an impossible name, for example one that is too long
        return False


def _is_homeless(value: Any) -> bool:
    return isinstance(value, str) and has_unknown_home(value)


def _no_home(key: str, value: str, source: str) -> Problem:
    user = value.partition("/")[0]
    return Problem(
        key, f"{quoted(value)} begins with {quoted(user)}, which is not an account here", "write out the path", source
    )


def _absolute_text(text: str, folder: Path) -> str:
    return (
        text
        if not text or is_none(text) or is_address(text) or text.startswith("sha256:")
        else str(_absolute(text, folder))
    )


def _absolute(text: str, folder: Path) -> Path:
    # Symbolic links are not resolved, so that messages and the report show the user's own names.
    import os.path

    return Path(os.path.normpath(folder / user_path(text)))


def _check(settings: Mapping[str, Setting], broken: set[str]) -> tuple[ExportConfiguration | None, list[Problem]]:
    """Validate the settings; set wrong ones aside and check the rest again, so that conflicts are reported too."""
    kept = {key: setting for key, setting in settings.items() if key not in broken}
    problems: list[Problem] = []
    while True:
        try:
            return ExportConfiguration.model_validate(_nested(kept)), problems
        except PydanticError as error:
            wrong: set[str] = set()
            for details in error.errors(include_url=False)[:MOST_PROBLEMS]:
                if details["type"] == "conflict":
                    found = details["ctx"]["problems"]
                    problems += [
                        _with_source(problem, settings) for problem in found if not _depends(problem.key, broken)
                    ]
                    return None, problems
                key = _key(details["loc"])
                if key not in wrong or is_table(key):  # for a list, the first problem is enough
                    problems.append(_problem(key, details, settings))
                wrong.add(key)
            broken = broken | wrong
            kept = {key: setting for key, setting in kept.items() if key not in wrong}


def _nested(settings: Mapping[str, Setting]) -> dict[str, Any]:
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


def _depends(key: str, broken: set[str]) -> bool:
    """Return whether a conflict about a key may come from a value that was set aside."""
    return any(other == key or other.startswith(f"{key}.") for other in broken)


def _with_source(problem: Problem, settings: Mapping[str, Setting]) -> Problem:
    setting = settings.get(problem.key)
    return Problem(problem.key, problem.message, problem.remedy, setting.source if setting else "")


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
    setting = settings.get(key)
    if is_table(key):
        place = ".".join(str(part) for part in details["loc"])
        return replace(_describe(key, details, setting), key=place)
    return _describe(key, details, setting)


def _describe(key: str, details: Any, setting: Setting | None) -> Problem:
    source = setting.source if setting else ""
    value = setting.value if setting and not is_table(key) else details["input"]
    context = details.get("ctx", {})
    if "remedy" in context:
        return Problem(key, details["msg"], context["remedy"], source)
    if details["type"] == "literal_error":
        return Problem(key, f"{quoted(value)} is not possible", f"use {context['expected']}", source)
    if details["type"] in {"greater_than", "greater_than_equal", "less_than_equal"}:
        word = "more" if "le" in context else "less"
        nearest = f"use more than {context['gt']:g}" if "gt" in context else "the nearest that works is {ge}{le}"
        remedy = nearest.format(ge=context.get("ge", ""), le=context.get("le", ""))
        return Problem(key, f"{quoted(value)} is {word} than allowed", remedy, source)
    kind = "mapping_type" if details["type"] in _NO_TABLE and is_table(key) else details["type"]
    if kind in _EXPECTED:
        what, remedy = _EXPECTED[kind]
        return Problem(key, f"{quoted(value)} {what}", remedy, source)
    return Problem(key, f"{quoted(value)}: {details['msg']}", "", source)
