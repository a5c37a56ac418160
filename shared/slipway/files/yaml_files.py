"""YAML files within limits: their size, their depth, and what their aliases and merge keys stand for.

A file of a kilobyte can name a list of lists of lists by aliases that fill any memory. So the document's size is counted as if every
alias were written out, while it is read, and reading ends where that becomes too large. libyaml parses, at five times the speed of Python.
"""

from __future__ import annotations

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
"""Digits of a number; the largest that a float holds has 309."""

_NO_VALUE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
"""What the library raises for a scalar that does not fit its tag, such as ``2001-99-99``, ``0x_`` or ``!!int abc``."""


@dataclass(frozen=True)
class Limits:
    """How large a document may be.

    Attributes:
        size_bytes: Of the file, and of all texts in it.
        nodes: Values, names and lists.
    """

    size_bytes: int = 256 << 10
    nodes: int = 5000


WRITTEN_BY_HAND = Limits()
"""Far more than a file that somebody writes needs; read in a fraction of a second."""
LISTS = Limits(4 << 20, 50_000)
"""For files that programs write, with thousands of entries; read within a second."""


class YamlError(Exception):
    """Why a file is not YAML that is read.

    Attributes:
        problem: What is wrong.
        line: Where, counted from 1; 0 where that is not known.
    """

    def __init__(self, problem: str, *, line: int = 0) -> None:
        super().__init__(f"line {line}: {problem}" if line else problem)
        self.problem = problem
        self.line = line


class YamlLimitError(YamlError):
    """A file is over a limit; the problem repeats nothing of what it says."""


def read_document(path: Path, *, limits: Limits = WRITTEN_BY_HAND) -> yaml.Node | None:
    """Return the root of a file's one document; None for an empty file.

    Raises:
        OSError: It cannot be read.
        YamlError: It is not UTF-8 or not YAML.
        YamlLimitError: It is over a limit.
    """
    with path.open("rb") as file:  # it may be a pipe; of what has no end, only the beginning is read
        data = file.read(limits.size_bytes + 1)
    if len(data) > limits.size_bytes:
        raise YamlLimitError(f"it has more than {limits.size_bytes} bytes")
    try:
        return _Loader(data.decode(), limits).get_single_node()
    except UnicodeDecodeError as error:
        raise YamlError("it is not a text file") from error
    except yaml.YAMLError as error:
        raise _fault(error) from error


def load_document(path: Path, *, limits: Limits = WRITTEN_BY_HAND) -> Any:
    """Return the plain values of a file's one document.

    Raises:
        OSError: It cannot be read.
        YamlError: It is not UTF-8, not YAML, or holds a value that cannot be.
        YamlLimitError: It is over a limit.
    """
    root = read_document(path, limits=limits)
    return None if root is None else value_of(root)


def value_of(node: yaml.Node) -> Any:
    """Return the plain value of a node.

    Raises:
        YamlError: A scalar does not fit its tag, or a tag is unknown.
    """
    try:
        return _Constructor().construct_document(node)
    except yaml.YAMLError as error:
        raise _fault(error) from error


def flatten(node: yaml.MappingNode) -> None:
    """Put the entries that a mapping takes by ``<<`` into it.

    Raises:
        YamlError: ``<<`` names something that is no mapping.
    """
    try:
        _Constructor().flatten_mapping(node)
    except yaml.YAMLError as error:
        raise _fault(error) from error


@dataclass(frozen=True, slots=True)
class _Measure:
    """What a node is, its aliases written out."""

    nodes: int
    characters: int
    depth: int


class _Loader(Composer, CParser, Resolver):
    """Composes nodes, and stops at the first that is too much."""

    def __init__(self, text: str, limits: Limits) -> None:
        CParser.__init__(self, text)
        Composer.__init__(self)
        Resolver.__init__(self)
        self._limits = limits
        self._depth = 0
        self._measures: dict[int, _Measure] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, or return the one that an alias names."""
        event: Any = self.peek_event()
        mark = event.start_mark
        self._depth += 1
        _check(self._depth <= MAX_DEPTH, _TOO_DEEP, mark)
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
    """Makes plain values; each that cannot be made is an error with its place."""

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


class _OverLimitError(yaml.MarkedYAMLError):
    """Stops the reading of a document."""


def _check(good: bool, problem: str, mark: yaml.Mark) -> None:
    if not good:
        raise _OverLimitError(problem=problem, problem_mark=mark)


def _fault(error: yaml.YAMLError) -> YamlError:
    mark = getattr(error, "problem_mark", None)
    kind = YamlLimitError if isinstance(error, _OverLimitError) else YamlError
    return kind(getattr(error, "problem", None) or str(error), line=mark.line + 1 if mark else 0)
