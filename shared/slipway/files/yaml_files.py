"""Read YAML files within limits of size and depth, counting aliases and merge keys as if they were written out.

A file of one kilobyte can use aliases to describe nested lists that fill any memory. So the expanded size is counted while reading,
and reading ends when it becomes too large. libyaml parses, five times as fast as Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.cyaml import CParser  # type: ignore[attr-defined] # the stubs do not export it
from yaml.resolver import Resolver

from slipway.texts import quoted

MAX_DEPTH = 32

_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
_MAX_NUMBER = 400
"""Most digits of a number; the largest float has 309."""
_MAX_TAG = 100
"""Longest tag; a directive can make every tag as long as the file."""
_LONG_TAG = f"a tag has more than {_MAX_TAG} characters"
_MOST_TAG_DIRECTIVES = 100
"""libyaml compares each with all before it."""
_MERGE = "tag:yaml.org,2002:merge"

_NO_VALUE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
"""Errors of the library for a scalar that does not fit its tag, such as ``2001-99-99``, ``0x_`` or ``!!int abc``."""


@dataclass(frozen=True)
class Limits:
    """The largest size of a document.

    Attributes:
        size_bytes: Bytes of the file, and characters of all texts in it.
        nodes: Values, names and lists.
    """

    size_bytes: int = 256 << 10
    nodes: int = 5000


WRITTEN_BY_HAND = Limits()
"""Far more than a hand-written file needs; read in a fraction of a second."""
LISTS = Limits(4 << 20, 50_000)
"""For files that programs write, with thousands of entries; read within a second."""


class YamlError(Exception):
    """A file is not usable YAML.

    Attributes:
        problem: The fault.
        line: Its line, counted from 1; 0 if unknown.
    """

    def __init__(self, problem: str, *, line: int = 0) -> None:
        super().__init__(f"line {line}: {problem}" if line else problem)
        self.problem = problem
        self.line = line


class YamlLimitError(YamlError):
    """A file exceeds a limit; the problem quotes nothing from it."""


def read_document(path: Path, *, limits: Limits = WRITTEN_BY_HAND) -> yaml.Node | None:
    """Return the root of a file's one document; None for an empty file.

    Raises:
        OSError: The file cannot be read.
        YamlError: It is not UTF-8 or not YAML.
        YamlLimitError: It is over a limit.
    """
    with path.open("rb") as file:  # it may be a pipe; the read is limited in case it has no end
        data = file.read(limits.size_bytes + 1)
    if len(data) > limits.size_bytes:
        raise YamlLimitError(f"it has more than {limits.size_bytes} bytes")
    if data.count(b"%TAG") > _MOST_TAG_DIRECTIVES:
        raise YamlLimitError(f"it has more than {_MOST_TAG_DIRECTIVES} times %TAG")
    try:
        return _Loader(data.decode(), limits).get_single_node()
    except UnicodeDecodeError as error:
        raise YamlError("it is not a text file") from error
    except yaml.YAMLError as error:
        raise _yaml_error(error) from error


def load_document(path: Path, *, limits: Limits = WRITTEN_BY_HAND) -> Any:
    """Return the plain values of a file's one document.

    Raises:
        OSError: The file cannot be read.
        YamlError: It is not UTF-8, not YAML, or holds an impossible value.
        YamlLimitError: It is over a limit.
    """
    root = read_document(path, limits=limits)
    return None if root is None else value_of(root)


def value_of(node: yaml.Node) -> Any:
    """Return the plain value of a node.

    Raises:
        YamlError: A scalar does not fit its tag, a tag is unknown, or a name is given twice.
    """
    try:
        _check_names(node)
        return _Constructor().construct_document(node)
    except yaml.YAMLError as error:
        raise _yaml_error(error) from error


def entries(node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return a mapping's entries: those that it merges by ``<<`` and does not replace, then its own.

    Raises:
        YamlError: ``<<`` stands twice, or names something that is not a mapping, or a mapping that has a name twice.
    """
    try:
        own = [entry for entry in node.value if entry[0].tag != _MERGE]
        return [*_merged_entries(node, replaced={_identity(key) for key, _ in own}), *own]
    except yaml.YAMLError as error:
        raise _yaml_error(error) from error


def _merged_entries(node: yaml.MappingNode, *, replaced: set[Any]) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Yield the entries that a mapping merges, except those with ``replaced`` names; the first mapping with a name wins."""
    merges = [(key, value) for key, value in node.value if key.tag == _MERGE]
    if len(merges) > 1:
        raise ConstructorError(None, None, "'<<' is given twice", merges[1][0].start_mark)
    for _, value in merges:
        for part in value.value if isinstance(value, yaml.SequenceNode) else (value,):
            if not isinstance(part, yaml.MappingNode):
                raise ConstructorError(
                    None, None, f"expected a mapping for merging, but found {part.id}", part.start_mark
                )
            _check_names(part)
            own = [entry for entry in part.value if entry[0].tag != _MERGE]
            inherited = [*own, *_merged_entries(part, replaced={_identity(key) for key, _ in own})]
            yield from (entry for entry in inherited if _identity(entry[0]) not in replaced)
            replaced |= {_identity(key) for key, _ in inherited}


def _identity(key: yaml.Node) -> Any:
    """Return a value that equal names share; a list or table equals nothing else."""
    return key.value if isinstance(key, yaml.ScalarNode) else id(key)


@dataclass(frozen=True, slots=True)
class _Measure:
    """Size of a node with its aliases written out."""

    nodes: int
    characters: int
    depth: int


class _Loader(Composer, CParser, Resolver):
    """Composes nodes, and stops at the first that exceeds a limit."""

    def __init__(self, text: str, limits: Limits) -> None:
        CParser.__init__(self, text)
        Composer.__init__(self)
        Resolver.__init__(self)
        self._limits = limits
        self._depth = self._composed = 0
        self._too_many = f"it has more than {limits.nodes} values"
        self._measures: dict[int, _Measure] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, or return the one that an alias names."""
        event: Any = self.peek_event()
        mark = event.start_mark
        self._depth += 1
        self._composed += 1  # the measure of a list is known at its end
        _check(self._depth <= MAX_DEPTH, _TOO_DEEP, mark)
        _check(self._composed <= self._limits.nodes, self._too_many, mark)
        _check(len(getattr(event, "tag", None) or "") <= _MAX_TAG, _LONG_TAG, mark)
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias:
            _check(id(node) in self._measures, "an alias stands within what it names", mark)
        elif node is not None:
            self._measures[id(node)] = self._measure(node, mark)
        return node

    def _measure(self, node: yaml.Node, mark: yaml.Mark) -> _Measure:
        inside = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
        if isinstance(node, yaml.ScalarNode):
            return _Measure(1, len(node.value), 1)
        parts = [self._measures[id(part)] for part in inside]
        nodes, characters = 1 + sum(part.nodes for part in parts), sum(part.characters for part in parts)
        depth = 1 + max((part.depth for part in parts), default=0)
        most, longest = self._limits.nodes, self._limits.size_bytes
        _check(nodes <= most, f"it has more than {most} values, what aliases name included", mark)
        _check(characters <= longest, f"it has more than {longest} characters, what aliases name included", mark)
        _check(depth <= MAX_DEPTH, f"it is nested more than {MAX_DEPTH} deep, what aliases name included", mark)
        return _Measure(nodes, characters, depth)


class _Constructor(SafeConstructor):
    """Makes plain values; an impossible value is an error with its line."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Make the value of one node."""
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        kind = node.tag.rpartition(":")[2]
        if kind in {"int", "float"} and len(node.value) > _MAX_NUMBER:
            raise ConstructorError(None, None, f"a number has {len(node.value)} characters", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except _NO_VALUE as error:
            raise ConstructorError(None, None, f"{quoted(node.value)} is no {kind}", node.start_mark) from error

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Return a scalar's text; the library would also take ``{=: text}`` for one, past the checks of scalars."""
        if not isinstance(node, yaml.ScalarNode):
            raise ConstructorError(None, None, f"expected a scalar node, but found {node.id}", node.start_mark)
        return super().construct_scalar(node)


def _check_names(root: yaml.Node) -> None:
    """Refuse a name that a table has twice: one of its values would be lost silently. Merged entries may be replaced."""
    nodes, checked = [root], set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.ScalarNode) or id(node) in checked:
            continue
        checked.add(id(node))
        names = set()
        for part in node.value:
            nodes += part if isinstance(part, tuple) else (part,)
            key = part[0] if isinstance(part, tuple) else None
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if (key.tag, key.value) in names:
                    raise ConstructorError(None, None, f"{quoted(key.value)} is given twice", key.start_mark)
                names.add((key.tag, key.value))


class _OverLimitError(yaml.MarkedYAMLError):
    """Stops the reading of a document."""


def _check(good: bool, problem: str, mark: yaml.Mark) -> None:
    if not good:
        raise _OverLimitError(problem=problem, problem_mark=mark)


def _yaml_error(error: yaml.YAMLError) -> YamlError:
    mark = getattr(error, "problem_mark", None)
    kind = YamlLimitError if isinstance(error, _OverLimitError) else YamlError
    return kind(getattr(error, "problem", None) or str(error), line=mark.line + 1 if mark else 0)
