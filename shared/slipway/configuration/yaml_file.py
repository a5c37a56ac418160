"""The YAML file as settings that know their line."""

from __future__ import annotations

from pathlib import Path

import yaml

from slipway.configuration.layers import Layer, Setting
from slipway.configuration.problems import Problem, configuration_error, did_you_mean
from slipway.configuration.schema import keys, sections, size

TOP = "export"


def read_yaml(path: Path) -> Layer:
    """The settings below ``export:`` of a YAML file.

    Raises:
        ConfigurationError: ``CONFIGURATION_NOT_FOUND`` when there is no such readable file, ``CONFIGURATION_INVALID`` when
            it is not YAML at all; anything else wrong with it is among the layer's problems.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (
            "is not a text file"
            if isinstance(error, UnicodeDecodeError)
            else (error.strerror or "cannot be read").lower()
        )
        problem = Problem("--config", f"{path}: {why}", "give the path of an export.yaml")
        raise configuration_error([problem], reason="CONFIGURATION_NOT_FOUND") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        source = f"{path.name}:{mark.line + 1}" if mark else path.name
        what = getattr(error, "problem", None) or str(error)
        raise configuration_error(
            [Problem(TOP, f"is not YAML: {what}", "check indentation and quotes", source)]
        ) from error
    layer = Layer()
    _read_root(root, _Reader(layer, path.name))
    return layer


def _read_root(root: yaml.Node | None, reader: _Reader) -> None:
    layer, name = reader.layer, reader.file
    if not isinstance(root, yaml.MappingNode):
        layer.problems.append(
            Problem(TOP, "the file has no export section", "put the settings below a line 'export:'", name)
        )
        return
    if not any(key.value == TOP for key, _ in root.value):
        layer.problems.append(
            Problem(TOP, "the file has no export section", "put the settings below a line 'export:'", name)
        )
    for key, value in root.value:
        if key.value == TOP:
            reader.section(value, "")
        else:
            remedy = "everything belongs below 'export:'"
            layer.problems.append(
                Problem(str(key.value), "is not known at the top of the file", remedy, reader.at(key))
            )


class _Reader:
    """Walks the nodes of one file."""

    def __init__(self, layer: Layer, file: str) -> None:
        self.layer, self.file = layer, file
        self._constructor = yaml.constructor.SafeConstructor()

    def at(self, node: yaml.Node) -> str:
        """File and line of a node."""
        return f"{self.file}:{node.start_mark.line + 1}"

    def section(self, node: yaml.Node, path: str) -> None:
        """Read the names of one section; ``path`` is its dotted path."""
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
            return
        if not isinstance(node, yaml.MappingNode):
            names = ", ".join(sections()[path])
            self._problem(path or TOP, "is a section, not a value", f"put its settings below it: {names}", node)
            return
        self._constructor.flatten_mapping(node)  # resolves "<<" merges
        seen: set[str] = set()
        for key_node, value_node in node.value:
            name = str(key_node.value)
            key = f"{path}.{name}" if path else name
            if name in seen:
                self._problem(key, "is given twice", "keep one of them", key_node)
            seen.add(name)
            self._entry(key, name, path, (key_node, value_node))

    def _entry(self, key: str, name: str, path: str, nodes: tuple[yaml.Node, yaml.Node]) -> None:
        key_node, value_node = nodes
        if key in keys():
            try:
                value = self._constructor.construct_document(value_node)
            except yaml.YAMLError as error:
                what = getattr(error, "problem", None) or "cannot be read"
                self._problem(key, f"is not plain YAML: {what}", "use plain values, without tags", value_node)
                self.layer.broken.add(key)
                return
            if key.endswith("_bytes") and isinstance(value, str):
                value = self._size(key, value, value_node)
            if value is not None:
                self.layer.settings[key] = Setting(value, self.at(value_node))
        elif key in sections():
            self.section(value_node, key)
        else:
            self._problem(key, "is not a setting", self._remedy(name, path), key_node)

    def _remedy(self, name: str, path: str) -> str:
        elsewhere = sorted(key for key in keys() if key.rpartition(".")[2] == name)
        if name not in sections()[path] and elsewhere:
            return f"did you mean {elsewhere[0]!r}?"
        return did_you_mean(name, sections()[path])

    def _size(self, key: str, value: str, node: yaml.Node) -> int | None:
        try:
            return size(value)
        except ValueError as error:
            message, _, remedy = str(error).partition("|")
            self._problem(key, message, remedy, node)
            self.layer.broken.add(key)
            return None

    def _problem(self, key: str, message: str, remedy: str, node: yaml.Node) -> None:
        self.layer.problems.append(Problem(key, message, remedy, self.at(node)))
