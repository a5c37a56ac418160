"""Read settings, with their lines, from the YAML file."""

from __future__ import annotations

from pathlib import Path

import yaml

from slipway.configuration.layers import Layer, Setting
from slipway.configuration.schema import keys, sections, unknown_setting
from slipway.files.yaml_files import YamlError, entries, read_document, value_of
from slipway.settings.problems import Problem, configuration_error, did_you_mean
from slipway.sizes import parse_size
from slipway.texts import MalformedText

TOP = "export"
_TABLE = "tag:yaml.org,2002:map"


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
        remedy = "check indentation and quotes, and write out the values instead of aliases"
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
            layer.problems.append(Problem(_name(key), "is not known at the top of the file", remedy, reader.at(key)))


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
        try:
            inside = entries(node)
        except YamlError as fault:
            self._problem(path or TOP, fault.problem, "let one << name a section, or a list of sections", node)
            return
        seen: set[str] = set()
        for key_node, value_node in inside:
            if self.layer.is_full:
                return
            name = _name(key_node)
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
                remedy = "use plain values without tags, and put texts in quotes"
                self._problem(key, f"is not plain YAML: {fault.problem}", remedy, value_node)
                self.layer.broken.add(key)
                return
            if key.endswith("_bytes") and isinstance(value, str):
                value = self._size(key, value, value_node)
            if value is not None:
                self.layer.settings[key] = Setting(value, self.at(value_node))
        elif key in sections():
            self.section(value_node, key)
        else:
            self.layer.problems.append(unknown_setting(key, self._remedy(name, path), self.at(key_node)))

    def _remedy(self, name: str, path: str) -> str:
        elsewhere = sorted(key for key in keys() if key.rpartition(".")[2] == name)
        if name not in sections()[path] and elsewhere:
            return f"did you mean {elsewhere[0]!r}?"
        return did_you_mean(name, sections()[path])

    def _size(self, key: str, value: str, node: yaml.Node) -> int | None:
        try:
            return parse_size(value)
        except MalformedText as error:
            self._problem(key, error.message, error.remedy, node)
            self.layer.broken.add(key)
            return None

    def _problem(self, key: str, message: str, remedy: str, node: yaml.Node) -> None:
        self.layer.problems.append(Problem(key, message, remedy, self.at(node)))


def _name(node: yaml.Node) -> str:
    """Return a key as text; for a list or table used as a key, say so."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "a list or table as a name"
