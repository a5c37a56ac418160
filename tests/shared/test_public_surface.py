"""What programs may build on: the names of ``slipway.__all__`` resolve, are documented and typed, and cost nothing until used."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import slipway
from slipway import errors, formats
from slipway.settings.sections import field_meanings
from support.commands.light_install import with_extras_hidden

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shared" / "slipway" / "__init__.py"
PAGE = ROOT / "docs" / "public-api.md"
OF_PYDANTIC = {name for name, _ in inspect.getmembers(BaseModel)}


def functions(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions that belong to a public name, and what they are called."""
    value = getattr(slipway, name)
    if inspect.isfunction(value):
        yield name, value
        return
    for key, member in inspect.getmembers(value):
        function = inspect.unwrap(getattr(member, "__func__", member))
        if key.startswith("_") or key in OF_PYDANTIC or not inspect.isfunction(function):
            continue
        if function.__module__.startswith("slipway") and function.__name__ != "<lambda>":  # a field's default
            yield f"{name}.{key}", function


@pytest.mark.parametrize("name", slipway.__all__)
def test_a_public_name_is_documented_and_typed(name: str) -> None:
    value = getattr(slipway, name)
    assert inspect.getdoc(value), name
    assert value.__module__.startswith("slipway"), name
    for called, function in functions(name):
        assert inspect.getdoc(function), f"{called} has no docstring"
        signature = inspect.signature(function)
        untyped = [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.annotation is parameter.empty and parameter.name not in ("self", "cls")
        ]
        assert untyped == [], called
        assert signature.return_annotation is not signature.empty, called


@pytest.mark.parametrize("name", ["ExportResult", "FormatResult", "FailedFormat", "AttemptResult"])
def test_the_fields_of_a_public_model_have_a_meaning(name: str) -> None:
    model: type[BaseModel] = getattr(slipway, name)
    assert sorted(model.model_fields) == sorted(field_meanings(model))


@pytest.mark.parametrize("name", ["Provider", "Stage", "LoadedConfiguration"])
def test_the_fields_of_a_public_dataclass_have_a_meaning(name: str) -> None:
    value = getattr(slipway, name)
    described = inspect.getdoc(value) or ""
    assert [field.name for field in dataclasses.fields(value) if f"{field.name}:" not in described] == []


def test_every_error_is_public() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ModelExportError)
    }
    assert tree <= set(slipway.__all__)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(PACKAGE.read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.asname or alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(imported) == sorted(slipway.__all__)
    assert sorted(slipway.__all__) == sorted(set(slipway.__all__))
    assert set(slipway.__all__) <= set(dir(slipway))
    with pytest.raises(AttributeError, match="nonesuch"):
        slipway.nonesuch  # noqa: B018 - that it is missing is the point


def test_the_reference_and_the_page_name_all_of_them() -> None:
    site = runpy.run_path(str(ROOT / "docs" / "site" / "build.py"))
    listed = [name for names in site["REFERENCE"].values() for name in names]
    assert sorted(listed) == sorted(slipway.__all__) == sorted(site["public_names"]())
    page = PAGE.read_text(encoding="utf-8")
    missing = [name for name in slipway.__all__ if f"`{name}`" not in page]
    assert [name for name in missing if not issubclass(getattr(slipway, name), errors.ModelExportError)] == []


def test_the_page_names_every_package_that_is_internal() -> None:
    assert "every package `slipway_…`" in PAGE.read_text(encoding="utf-8")
    packages = [path.parent.name for path in (ROOT / "services").glob("*/*/__init__.py")]
    assert packages
    assert [name for name in packages if not name.startswith("slipway_")] == []


def test_documentation_and_examples_use_public_names_alone() -> None:
    programs = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    for page in (ROOT / "docs").glob("*.md"):
        fences = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        programs |= {f"{page.name} {number}": text for number, text in enumerate(fences)}
    imported = {
        (where, node.module or "", alias.name)
        for where, text in programs.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    ours = {entry for entry in imported if entry[1].split(".")[0] == "slipway"}
    assert ours
    public = {"slipway": slipway.__all__, "slipway.formats": formats.__all__}
    assert [entry for entry in ours if entry[2] not in public.get(entry[1], ())] == []


def test_importing_the_package_loads_nothing(tmp_path: Path) -> None:
    light = with_extras_hidden(tmp_path)
    script = (
        "import sys, typing; before = set(sys.modules); import slipway\n"
        "print(sorted(set(sys.modules) - before - {'slipway'}))\n"
        "print([name for name in slipway.__all__ if getattr(slipway, name) is None])\n"
        "print(sorted({'torch', 'numpy', 'sqlalchemy', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=light.environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "[]", "[]"]


PROGRAM = """
from collections.abc import Mapping
from pathlib import Path

import slipway
from slipway import formats


class Params(slipway.StageParams):
    least: int = 1


def run(inputs: Mapping[str, Path], params: Params, ctx: slipway.Context) -> dict[str, Path]:
    reveal_type(params.least + 1)
    return {"out": ctx.workdir / "out"}


STAGE = slipway.Stage(name="s", version=1, inputs=(), outputs=("out",), params=Params, run=run)
reveal_type(slipway.load_configuration(None, environment={}).configuration.output.directory)
with slipway.Client("localhost:7070", security=slipway.Security()) as client:
    reveal_type(client.address)
try:
    raise slipway.ModelExportError("x")
except slipway.ModelExportError as error:
    reveal_type(error.reason)
reveal_type(slipway.export("run", formats=["gguf:q4_k_m"], settings={"validation.enabled": False}).require().success)


async def main() -> None:
    reveal_type((await slipway.plan_async("run", configuration=Path("export.yaml"))).formats)
    await slipway.export_async("run", progress=lambda progress: print(progress.done))
    reveal_type((await slipway.export_async(["run", "another"], formats="gguf")).failed)
    reveal_type([each.name for each in slipway.export((Path("run"),), progress=True)])
    await slipway.export_async("run", format="gguf")


slipway.Stage(name=1, version=1, inputs=(), outputs=("out",), params=Params, run=run)
"""


LISTS = ("tuple[slipway.exporting.batches.result.BatchEntry, ...]", "list[str]")
"""Types of what is revealed of lists of runs."""


@pytest.mark.slow
def test_a_program_that_builds_on_it_is_checked_strictly(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    mypy = [sys.executable, "-P", "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]  # fmt: skip
    done = subprocess.run([*mypy, str(program)], cwd=ROOT, capture_output=True, text=True)
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines() if "program.py" in line]
    revealed = [line.partition('"')[2].rstrip('"') for line in lines if "Revealed type" in line]
    assert revealed == ["int", "str", "str", "str", "bool", "tuple[str, ...]", *LISTS], done.stdout
    assert [line for line in lines if line.startswith("error")] == [
        'error: Unexpected keyword argument "format" for overloaded function "export_async"; did you mean "formats"?  [call-overload]',
        'error: No overload variant of "export_async" matches argument types "str", "str"  [call-overload]',
        'error: Argument "name" to "Stage" has incompatible type "int"; expected "str"  [arg-type]',
    ]
