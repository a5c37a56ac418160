"""Formats and stages are known by their contracts: outside their own packages, none is named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from slipway.formats.registry import formats
from slipway.registry import stage_names

ROOT = Path(__file__).parents[3]
ROOMS = (ROOT / "shared" / "slipway", ROOT / "services" / "coordinator" / "slipway_coordinator")
_WORDS = ("adapter", "reference")
"""Formats and stages with the name of what they make, which everything speaks of."""
FORMATS = tuple(name for name in formats() if name not in _WORDS)
STAGES = tuple(name for name in stage_names() if name not in _WORDS)
_FORMAT = re.compile(rf"(?<!\w)({'|'.join(FORMATS)})(?!\w)")
_OTHER_TEXTS = (".j2", ".yaml")

_GGUF_LIBRARY = {
    "gguf": "the library and the file that the base of the real sample is read from, and its configuration"
}
ALLOWED = {
    "shared/slipway/distribution.py": _GGUF_LIBRARY,
    "shared/slipway/sample/real/making.py": {
        **dict.fromkeys(("pytorch", "onnx", "openvino"), "the configuration that the real sample writes"),
        **_GGUF_LIBRARY,
    },
    "shared/slipway/model/graphs/pictures.py": {"onnx": "the ending of a graph's file"},
    "shared/slipway/model/dtypes.py": {"onnx": "the column of a library's own names for types"},
    "shared/slipway/cli/export/command.py": dict.fromkeys(("pytorch", "gguf", "onnx"), "examples of the help"),
    "shared/slipway/cli/remote/commands.py": {"gguf": "an example of the help"},
    "shared/slipway/execution/child_main.py": {
        "prepare": "a phase of a task's span, of every stage; dashboards know it"
    },
}
"""By file, the names that may stand there, with the reason."""


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module, except its docstrings, with their lines."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    lines = [line for body in bodies for line in body if isinstance(line, ast.Expr)]
    said = {id(line.value) for line in lines if isinstance(line.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.lineno, node.value


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names of attributes, variables and arguments, with their lines."""
    for node in ast.walk(tree):
        for attribute in ("attr", "id", "arg", "name"):
            value = getattr(node, attribute, None)
            if isinstance(value, str) and not isinstance(node, ast.alias | ast.FunctionDef | ast.AsyncFunctionDef):
                yield getattr(node, "lineno", 0), value


def named(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each mention of a format or a stage in a file: line and name."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        for number, line in enumerate(text.splitlines(), 1):
            yield from ((number, found) for found in _FORMAT.findall(line))
            yield from ((number, name) for name in STAGES if re.search(rf"[\[ ,]{name}[\],]", line))
        return
    tree = ast.parse(text)
    for line, value in strings(tree):
        yield from ((line, found) for found in _FORMAT.findall(value))
        yield from ((line, name) for name in STAGES if value == name)
    yield from ((line, name) for line, name in identifiers(tree) if name in FORMATS)


FILES = sorted(
    path for room in ROOMS for path in room.rglob("*") if path.suffix in {".py", *_OTHER_TEXTS} and path.is_file()
)


def test_no_format_and_no_stage_is_named() -> None:
    assert len(FILES) > 300
    found = [
        f"{path.relative_to(ROOT)}:{line} names {name}"
        for path in FILES
        for line, name in named(path)
        if name not in ALLOWED.get(path.relative_to(ROOT).as_posix(), {})
    ]
    assert found == [], "ask the format's or the stage's own value instead"


def test_what_is_allowed_is_there() -> None:
    for name, names in ALLOWED.items():
        there = {found for _, found in named(ROOT / name)}
        assert set(names) <= there, f"{name} has an exception that it does not need"


def test_names_are_found_where_they_stand(tmp_path: Path) -> None:
    """The search finds names in code and templates, but not in docstrings."""
    file = tmp_path / "module.py"
    file.write_text(
        '"""Of onnx."""\nif formats.onnx.enabled or task.stage == "merge":\n    say(f"set formats.pytorch: {x}")\n'
    )
    assert sorted(named(file)) == [(2, "merge"), (2, "onnx"), (3, "pytorch")]
    template = tmp_path / "page.j2"
    template.write_text("{% if kind == 'tensorrt' %}\nstages: [quantize]\n")
    assert sorted(named(template)) == [(1, "tensorrt"), (2, "quantize")]
