"""Read YAML files within limits of size and depth, as plain lists and tables: aliases, tags and merge keys (``<<``) are refused.

A file of one kilobyte can use aliases to describe nested lists that fill any memory, and tags to name any type. Settings need neither.
libyaml parses, five times as fast as Python.
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
"""Most digits of a number; the largest float has 309."""
_MOST_TAG_DIRECTIVES = 100
"""libyaml compares each with all before it."""
_MERGE = "tag:yaml.org,2002:merge"

_NO_VALUE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
"""Errors of the library for a scalar that only looks like a value of its type, such as ``2001-99-99`` or ``0x_``."""


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
        YamlError: It is not UTF-8, not YAML, or has an alias, a tag or ``<<``.
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
        YamlError: As :func:`read_document`, or it holds an impossible value.
        YamlLimitError: It is over a limit.
    """
    root = read_document(path, limits=limits)
    return None if root is None else value_of(root)


def value_of(node: yaml.Node) -> Any:
    """Return the plain value of a node.

    Raises:
        YamlError: A value is impossible, or a name is given twice.
    """
    try:
        _check_names(node)
        return _Constructor().construct_document(node)
    except yaml.YAMLError as error:
        raise _yaml_error(error) from error


class _Loader(Composer, CParser, Resolver):
    """Composes nodes, and stops at the first that exceeds a limit or is no plain list, table or value."""

    def __init__(self, text: str, limits: Limits) -> None:
        CParser.__init__(self, text)
        Composer.__init__(self)
        Resolver.__init__(self)
        self._limits = limits
        self._depth = self._composed = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node."""
        event: Any = self.peek_event()
        mark = event.start_mark
        self._depth += 1
        self._composed += 1
        _check(self._depth <= MAX_DEPTH, _TOO_DEEP, mark)
        _check(self._composed <= self._limits.nodes, f"it has more than {self._limits.nodes} values", mark)
        if isinstance(event, yaml.AliasEvent):
            raise _refuse("an alias (*)", mark)
        if event.tag is not None:
            raise _refuse("a tag (!)", mark)
        node = super().compose_node(parent, index)
        if node is not None and node.tag == _MERGE:
            raise _refuse("a merge key (<<)", mark)
        self._depth -= 1
        return node


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


def _check_names(root: yaml.Node) -> None:
    """Refuse a name that a table has twice: one of its values would be lost silently."""
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.ScalarNode):
            continue
        names = set()
        for part in node.value:
            nodes += part if isinstance(part, tuple) else (part,)
            key = part[0] if isinstance(part, tuple) else None
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in names:
                    raise ConstructorError(None, None, f"{quoted(key.value)} is given twice", key.start_mark)
                names.add((key.tag, key.value))


class _OverLimitError(yaml.MarkedYAMLError):
    """Stops the reading of a document."""


def _check(good: bool, problem: str, mark: yaml.Mark) -> None:
    if not good:
        raise _OverLimitError(problem=problem, problem_mark=mark)


def _refuse(what: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(
        problem=f"it has {what}, which is not read here: write the value out", problem_mark=mark
    )


def _yaml_error(error: yaml.YAMLError) -> YamlError:
    mark = getattr(error, "problem_mark", None)
    kind = YamlLimitError if isinstance(error, _OverLimitError) else YamlError
    return kind(getattr(error, "problem", None) or str(error), line=mark.line + 1 if mark else 0)
