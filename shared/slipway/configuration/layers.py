"""Read the settings of one source, with their origin and its problems: variables or a YAML file.

A setting is kept by its dotted key. Each has one ``EXPORT_*`` variable. Those of a YAML file keep their line.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml

from slipway.configuration.schema import keys, parse_text, sections, unknown_setting
from slipway.files.yaml_files import YamlError, read_document, value_of
from slipway.formats.registry import formats, refused_format, refused_formats
from slipway.settings.problems import Problem, configuration_error, did_you_mean
from slipway.settings.sections import EXPORT_VARIABLES
from slipway.sizes import parse_size
from slipway.texts import MalformedText, quoted

MOST_PROBLEMS = 100
"""Stop reading a source after this many problems: it is probably not a configuration."""

PREFIX = "EXPORT_"

ENVIRONMENT: Mapping[str, str] = {
    **EXPORT_VARIABLES,
    **{
        each.variable(setting): f"formats.{name}.{setting}"
        for name, each in formats().items()
        for setting in each.settings.model_fields
    },
}
"""Setting of each variable. Commas separate the items of a list; an empty variable counts as not set."""
assert set(ENVIRONMENT.values()) == set(keys()), "every setting has one variable"

TOP = "export"
_TABLE = "tag:yaml.org,2002:map"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its source, such as ``export.yaml:12``, ``EXPORT_OUTPUT_DIR`` or ``--out``."""

    value: Any
    source: str


def put_setting(settings: dict[str, Setting], key: str, setting: Setting) -> None:
    """Add a setting, replacing an earlier value. A table replaces only the rows it names."""
    before = settings.get(key)
    if before is not None and isinstance(before.value, Mapping) and isinstance(setting.value, Mapping):
        sources = dict.fromkeys((before.source, setting.source))
        setting = Setting(_merge_tables(before.value, setting.value), ", ".join(sources))
    settings[key] = setting


def _merge_tables(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return one table with the rows of both; where both have a row, ``after`` wins, and rows that are tables are merged."""
    both = {
        name: _merge_tables(before[name], row)
        for name, row in after.items()
        if isinstance(row, Mapping) and isinstance(before.get(name), Mapping)
    }
    return {**before, **after, **both}


@dataclass
class Layer:
    """The settings of one source.

    Attributes:
        settings: Values by dotted key.
        problems: Faults of the source.
        warnings: One text for each thing that was ignored.
        broken: Keys whose value could not be read; no further problem is reported for them.
        replaced: Keys whose values in earlier sources do not count any more, as other settings of this one replace them.
    """

    settings: dict[str, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        """Return whether there are so many problems that the rest is not read."""
        return len(self.problems) >= MOST_PROBLEMS


def read_environment(environment: Mapping[str, str]) -> Layer:
    """Read the settings in the ``EXPORT_*`` variables.

    An unknown variable that resembles a known one is a problem, because it is probably a misspelling. Any other unknown
    variable is only a warning, because other programs use this prefix too.
    """
    layer = Layer()
    for name in sorted(environment):
        if layer.is_full:
            break
        text = environment[name]
        if not name.startswith(PREFIX) or not text.strip():
            continue
        if name not in ENVIRONMENT:
            _report_unknown(name, layer)
            continue
        key = ENVIRONMENT[name]
        try:
            layer.settings[key] = Setting(parse_text(key, text), name)
        except MalformedText as error:
            layer.problems.append(Problem(key, error.message, error.remedy, name))
            layer.broken.add(key)
    return layer


def _report_unknown(name: str, layer: Layer) -> None:
    for refused in refused_formats():
        own = f"{PREFIX}{refused.name.upper()}_"
        if refused_format(refused.name) and (name == f"{PREFIX}ENABLE_{refused.name.upper()}" or name.startswith(own)):
            error = refused.error()
            layer.problems.append(Problem(name, error.message, error.remedy, "environment"))
            return
    close = difflib.get_close_matches(name, sorted(ENVIRONMENT), n=1, cutoff=0.85)
    if close:
        layer.problems.append(
            Problem(name, "is not a variable of Slipway", f"did you mean {close[0]!r}?", "environment")
        )
    else:
        layer.warnings.append(f"environment variable {name} is unknown to Slipway and was ignored")


def read_yaml(path: Path) -> Layer:
    """Read the settings below ``export:`` in a YAML file.

    Raises:
        ConfigurationError: ``CONFIGURATION_NOT_FOUND`` if the file does not exist or cannot be read, ``CONFIGURATION_INVALID`` if
            it is not YAML or exceeds the limits. All other faults are in the layer's ``problems``.
    """
    try:
        root = read_document(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        why = (getattr(error, "strerror", "") or "cannot be read").lower()
        problem = Problem("--config", f"{path}: {why}", "give the path of an export.yaml")
        raise configuration_error([problem], reason="CONFIGURATION_NOT_FOUND") from error
    except YamlError as fault:
        source = f"{path.name}:{fault.line}" if fault.line else path.name
        remedy = "check indentation and quotes"
        raise configuration_error([Problem(TOP, f"is not YAML: {fault.problem}", remedy, source)]) from fault
    layer = Layer()
    _read_root(root, _Reader(layer, path.name))
    return layer


def _read_root(root: yaml.Node | None, reader: _Reader) -> None:
    layer, name = reader.layer, reader.file
    top = root.value if isinstance(root, yaml.MappingNode) and root.tag == _TABLE else ()
    if not any(key.value == TOP for key, _ in top):
        layer.problems.append(
            Problem(TOP, "the file has no export section", "put the settings below a line 'export:'", name)
        )
    for key, value in top:
        if layer.is_full:
            return
        if key.value == TOP:
            reader.section(value, "")
        else:
            remedy = "put it below 'export:'"
            layer.problems.append(
                Problem(_key_name(key), "is not known at the top of the file", remedy, reader.at(key))
            )


def read_data(data: object, source: str = "configuration") -> Layer:
    """Read nested plain data as a YAML file with it would be read; the settings may also be at its top, without ``export``.

    Raises:
        ConfigurationError: It is no table. All other faults are in the layer's ``problems``.
    """
    if not isinstance(data, Mapping):
        remedy = "give a table like {'checkpoint': {'path': 'run'}}, or the path of an export.yaml"
        raise configuration_error([Problem(source, f"{quoted(data)} is not a table", remedy)])
    layer = Layer()
    if TOP not in data:
        _read_section(data, "", source, layer)
        return layer
    for name, value in data.items():
        if name == TOP:
            _read_section(value, "", source, layer)
        else:
            problem = Problem(str(name), f"is not known beside {TOP!r}", f"put it below {TOP!r}", source)
            layer.problems.append(problem)
    return layer


def _read_section(data: object, path: str, source: str, layer: Layer) -> None:
    if data is None:
        return
    if not isinstance(data, Mapping):
        names = ", ".join(sections()[path])
        layer.problems.append(
            Problem(path or TOP, f"{quoted(data)} is not a section", f"put its settings into it: {names}", source)
        )
        return
    for name, value in data.items():
        if layer.is_full:
            return
        key = f"{path}.{name}" if path else str(name)
        if key in sections():
            _read_section(value, key, source, layer)
        elif key not in keys():
            layer.problems.append(unknown_setting(key, _remedy(str(name), path), source))
        elif key.endswith("_bytes") and isinstance(value, str):
            _read_size(key, value, source, layer)
        elif value is not None:
            layer.settings[key] = Setting(_plain(value), source)


def _plain(value: object) -> object:
    """Return a value as YAML would give it: paths are texts, and a tuple is a list."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _read_size(key: str, text: str, source: str, layer: Layer) -> None:
    """Read a size such as ``8GiB``."""
    try:
        layer.settings[key] = Setting(parse_size(text), source)
    except MalformedText as error:
        layer.problems.append(Problem(key, error.message, error.remedy, source))
        layer.broken.add(key)


def _remedy(name: str, path: str) -> str:
    """Return what else a name in a section may mean."""
    elsewhere = sorted(key for key in keys() if key.rpartition(".")[2] == name)
    if name not in sections()[path] and elsewhere:
        return f"did you mean {elsewhere[0]!r}?"
    return did_you_mean(name, sections()[path])


class _Reader:
    """Walks the nodes of one file."""

    def __init__(self, layer: Layer, file: str) -> None:
        self.layer, self.file = layer, file

    def at(self, node: yaml.Node) -> str:
        """Return the file and line of a node."""
        return f"{self.file}:{node.start_mark.line + 1}"

    def section(self, node: yaml.Node, path: str) -> None:
        """Read the names of one section; ``path`` is its dotted path."""
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
            return
        if not isinstance(node, yaml.MappingNode) or node.tag != _TABLE:
            names = ", ".join(sections()[path])
            self._problem(path or TOP, "is a section, not a value", f"put its settings below it: {names}", node)
            return
        seen: set[str] = set()
        for key_node, value_node in node.value:
            if self.layer.is_full:
                return
            name = _key_name(key_node)
            key = f"{path}.{name}" if path else name
            if name in seen:
                self._problem(key, "is given twice", "keep one of them", key_node)
            seen.add(name)
            self._entry(key, name, path, (key_node, value_node))

    def _entry(self, key: str, name: str, path: str, nodes: tuple[yaml.Node, yaml.Node]) -> None:
        key_node, value_node = nodes
        if key in keys():
            try:
                value = value_of(value_node)
            except YamlError as fault:
                remedy = "use plain values, and put texts in quotes"
                self._problem(key, f"is not plain YAML: {fault.problem}", remedy, value_node)
                self.layer.broken.add(key)
                return
            if key.endswith("_bytes") and isinstance(value, str):
                _read_size(key, value, self.at(value_node), self.layer)
            elif value is not None:
                self.layer.settings[key] = Setting(value, self.at(value_node))
        elif key in sections():
            self.section(value_node, key)
        else:
            self.layer.problems.append(unknown_setting(key, _remedy(name, path), self.at(key_node)))

    def _problem(self, key: str, message: str, remedy: str, node: yaml.Node) -> None:
        self.layer.problems.append(Problem(key, message, remedy, self.at(node)))


def _key_name(node: yaml.Node) -> str:
    """Return a key as text; for a list or table used as a key, say so."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "a list or table as a name"
