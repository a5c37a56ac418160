"""Measure how a value walks through the code: the rooms (modules) that functions take it to, and how often it comes back to one.

    python tests/harness/walks.py [FOLDER]

Follows an argument from a function through all calls that it is passed to, in the order of the source, each function once. A room is
*entered* at its first call, and *returned to* at each later call that comes from another room. Only calls of functions and classes of the
product are followed, by their names; methods of values are not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

STARTS = {
    "the configuration": ("slipway.planning.plan", "plan", "configuration"),
    "merge: base": ("slipway_merge.merge", "merge", "base"),
    "validate: inputs": ("slipway_validate.validation", "validate", "inputs"),
    "onnx_export: inputs": ("slipway_onnx_export.export", "export_model", "inputs"),
    "executorch: folder": ("slipway_executorch.export", "export_model", "folder"),
}


@dataclass(frozen=True)
class Place:
    """A function with the argument that is followed."""

    module: str
    function: str
    argument: str


@dataclass
class Walk:
    """What was seen on the way.

    Attributes:
        rooms: The modules, in the order in which they were entered.
        returns: Number of calls from one room into another that was entered before.
    """

    rooms: list[str] = field(default_factory=list)
    returns: int = 0

    def step(self, came_from: str, room: str) -> None:
        """Note a call."""
        if room not in self.rooms:
            self.rooms.append(room)
        elif room != came_from:
            self.returns += 1


class Tree:
    """The sources of the product below a folder."""

    def __init__(self, folder: Path) -> None:
        packages = [folder / "shared" / "slipway", *(folder / "services").glob("*/slipway_*")]
        self._files = {
            ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
            for package in packages
            for path in package.rglob("*.py")
        }
        self.parsed = cache(self._parse)

    def _parse(self, module: str) -> tuple[dict[str, ast.AST], dict[str, tuple[str, str]]]:
        """Return a module's functions, by ``name`` or ``Class.name``, and what its names import: (module, name)."""
        tree = ast.parse(self._files[module].read_text(encoding="utf-8"))
        functions: dict[str, ast.AST] = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                functions |= {
                    f"{node.name}.{each.name}": each for each in node.body if isinstance(each, ast.FunctionDef)
                }
        imports = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        return functions, imports

    def callee(self, module: str, call: ast.Call) -> tuple[str, str] | None:
        """Return module and name of the function that a call runs; None if it is none of the product's, or not known."""
        names = _dotted(call.func)
        if not names:
            return None
        functions, imports = self.parsed(module)
        if names[0] in imports:
            home, name = imports[names[0]]
            if f"{home}.{name}" in self._files:  # a module
                home, names = f"{home}.{name}", names[1:]
            else:
                names = [name, *names[1:]]
            for _ in range(3):  # names that a package passes on
                if home not in self._files:
                    return None
                functions, imports = self.parsed(home)
                if names and names[0] in imports and not _known(functions, names):
                    home, first = imports[names[0]]
                    names = [first, *names[1:]]
        else:
            home = module
        found = _known(functions, names)
        return (home, found) if found and home in self._files else None


def _dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return [*before, node.attr]
    return []


def _known(functions: dict[str, ast.AST], names: list[str]) -> str:
    dotted = ".".join(names)
    return next((each for each in (dotted, f"{dotted}.__init__") if each in functions), "")


def _calls(function: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in a function, in the order of the source."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    yield from sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _followed(function: ast.FunctionDef, argument: str) -> set[str]:
    """Return the argument with the local names for it or a part of it."""
    names = {argument}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or any(isinstance(each, ast.Call) for each in ast.walk(node.value)):
            continue
        if _mentions(node.value, names):
            names |= {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return names


def _mentions(node: ast.expr, names: set[str]) -> bool:
    """Return whether an expression is one of some names, or a part of it."""
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def _passed(call: ast.Call, function: ast.FunctionDef, names: set[str], *, bound: bool) -> Iterator[str]:
    """Yield the parameters of a function that a call gives the value."""
    parameters = [each.arg for each in function.args.args][1 if bound else 0 :]
    for parameter, value in zip(parameters, call.args, strict=False):
        if _mentions(value, names):
            yield parameter
    yield from (each.arg for each in call.keywords if each.arg and _mentions(each.value, names))


def walk(tree: Tree, start: Place) -> Walk:
    """Follow an argument from a function on."""
    found, seen = Walk([start.module]), set[Place]()

    def visit(place: Place) -> None:
        if place in seen:
            return
        seen.add(place)
        function = tree.parsed(place.module)[0][place.function]
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        names = _followed(function, place.argument)  # type: ignore[arg-type]
        for call in _calls(function):
            if (callee := tree.callee(place.module, call)) is None:
                continue
            home, name = callee
            target = tree.parsed(home)[0][name]
            passed = list(_passed(call, target, names, bound="." in name))  # type: ignore[arg-type]
            if passed:
                found.step(place.module, home)
            for parameter in passed:
                visit(Place(home, name, parameter))

    visit(start)
    return found


def main() -> None:
    """Print the walks of a working copy."""
    tree = Tree(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2])
    for title, (module, function, argument) in STARTS.items():
        found = walk(tree, Place(module, function, argument))
        print(f"{title:22} {len(found.rooms):3} rooms entered, {found.returns:3} returned to")


if __name__ == "__main__":
    main()
