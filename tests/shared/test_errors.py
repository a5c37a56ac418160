"""Reasons are an interface: every one used is declared, every one declared is documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from slipway.configuration.schema import keys
from slipway.errors import ERROR_TYPES, Failure, ModelExportError
from slipway.reasons import EXIT_CODES, REASONS

DOCUMENTED_CODES = {0, 2, 3, 4, 5, 6, 7, 130, 141}
OWN_FAULTS = {"INTERNAL", "STAGE_ERROR"}
ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("shared", "services") for path in sorted((ROOT / folder).rglob("*.py"))]


def reasons_in(path: Path) -> set[str]:
    """Every literal in a file that becomes a reason: an argument, a variable or a key of that name, or part of one."""
    values: list[ast.expr] = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(keywords=keywords):
                values += [keyword.value for keyword in keywords if keyword.arg == "reason"]
            case ast.Assign(targets=[ast.Name(id="reason" | "default_reason")], value=value):
                values.append(value)
            case ast.AnnAssign(target=ast.Name(id="reason" | "default_reason"), value=ast.expr() as value):
                values.append(value)
            case ast.FunctionDef(args=arguments):
                named = zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)
                named = [*named, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
                values += [default for argument, default in named if argument.arg == "reason" and default is not None]
            case ast.Dict(keys=keys, values=parts):
                pairs = zip(keys, parts, strict=True)
                values += [part for key, part in pairs if isinstance(key, ast.Constant) and key.value == "reason"]
    constants = [part.value for value in values for part in ast.walk(value) if isinstance(part, ast.Constant)]
    return {value for value in constants if isinstance(value, str) and re.fullmatch(r"[A-Z][A-Z_]+", value)}


def reasons_in_tables(path: Path) -> set[str]:
    """Every reason in the first column of a page's tables of reasons."""
    found: set[str] = set()
    table = False
    for line in path.read_text().splitlines():
        table = line.startswith(("| reason |", "| Reason |")) or (table and line.startswith("|"))
        if table:
            found |= set(re.findall(r"`([A-Z][A-Z_]+)`", line.split("|")[1]))
    return found


def test_every_reason_used_is_declared() -> None:
    used = {reason: path for path in SOURCES for reason in reasons_in(path)}
    assert used
    assert {reason: path for reason, path in used.items() if reason not in REASONS} == {}


def test_every_reason_that_a_page_names_is_declared() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "services").rglob("*.md"))]
    named = {reason: page.name for page in pages for reason in reasons_in_tables(page)}
    assert "STATE_DENIED" in named
    assert {reason: page for reason, page in named.items() if reason not in REASONS} == {}


def test_every_exit_code_is_one_of_the_documented_ones() -> None:
    codes = {name: reason.category.exit_code for name, reason in REASONS.items()}
    assert set(EXIT_CODES) == {*DOCUMENTED_CODES, 1}
    assert {name: code for name, code in codes.items() if code not in DOCUMENTED_CODES} == dict.fromkeys(OWN_FAULTS, 1)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("EXPORT_PARITY_FAILED", 4),
        ("MERGE_NOT_VERIFIED", 4),
        ("QUANTIZATION_FAILED", 4),
        ("EXPORT_ENGINE_FAILED", 6),
        ("TENSORRT_BUILD_FAILED", 6),
        ("STAGE_CRASHED", 7),
        ("STAGE_KILLED", 7),
    ],
)
def test_what_libraries_and_machines_cause_is_no_fault_of_slipway(reason: str, code: int) -> None:
    assert Failure(reason=reason, message="m").exit_code == code


@pytest.mark.parametrize("page", ["docs/public-api.md", "docs/reasons.md"])
def test_pages_have_every_exit_code_with_its_meaning(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert [code for code, meaning in EXIT_CODES.items() if f"| {code} | {meaning} |" not in text] == []


@pytest.mark.parametrize(
    ("reasons", "decides"),
    [
        (["STAGE_KILLED", "UNSUPPORTED"], "UNSUPPORTED"),
        (["UNSUPPORTED", "VALIDATION_FAILED"], "VALIDATION_FAILED"),
        (["OUT_OF_MEMORY", "STORE_UNAVAILABLE"], "OUT_OF_MEMORY"),
        (["UNSUPPORTED", "STAGE_ERROR", "FILE_ERROR"], "STAGE_ERROR"),
        (["DISK_FULL", "OUT_OF_MEMORY"], "DISK_FULL"),
        (["FROM_THE_FUTURE", "EXPORT_PARITY_FAILED"], "EXPORT_PARITY_FAILED"),
    ],
)
def test_one_of_several_failures_decides(reasons: list[str], decides: str) -> None:
    found = Failure.deciding(Failure(reason=reason, message="m") for reason in reasons)
    assert found is not None
    assert found.reason == decides


def test_every_failure_can_be_the_one_that_decides() -> None:
    everything = [Failure(reason=reason, message="m") for reason in REASONS]
    assert [failure for failure in everything if Failure.deciding([failure]) is not failure] == []
    assert Failure.deciding([]) is None


def test_code_that_several_commands_share_names_no_setting_of_one() -> None:
    """``slipway stage merge`` has no base_model.name: what an export sets stands in the recovery table's guidance."""
    rooms = ROOT / "shared" / "slipway"
    deep = [ROOT / "services", rooms / "execution", rooms / "sources"]
    files = [path for folder in deep for path in sorted(folder.rglob("*.py")) if "coordinator" not in path.parts]
    files += [rooms / name for name in ("model/model_files.py", "machine/shortages.py", "model/base_format.py")]
    assert {path.name for path in files} >= {"supervisor.py", "addresses.py", "stage.py"}
    named = {
        f"{path.name}: {part.value}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "remedy"
        for part in ast.walk(node.value)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
        if any(re.search(rf"\b{re.escape(key)}\b", part.value) for key in (*keys(), "formats.onnx", "--base-model"))
    }
    assert named == set()


def test_every_declared_reason_is_used() -> None:
    text = "\n".join(path.read_text() for path in SOURCES if path.name not in {"errors.py", "reasons.py"})
    defaults = {cls.default_reason for cls in ERROR_TYPES.values()}
    assert [reason for reason in REASONS if f'"{reason}"' not in text and reason not in defaults] == []


def test_the_documentation_lists_every_reason_with_its_exit_code() -> None:
    rows = [
        line.split("|") for line in (ROOT / "docs" / "reasons.md").read_text().splitlines() if line.startswith("| `")
    ]
    documented = {row[1].strip(" `"): (int(row[2]), row[3].strip(" `"), row[4].strip()) for row in rows}
    declared = {
        name: (reason.category.exit_code, reason.category.status_code, reason.meaning)
        for name, reason in REASONS.items()
    }
    assert documented == declared


@pytest.mark.parametrize("name", sorted(ERROR_TYPES))
def test_errors_survive_the_wire(name: str) -> None:
    error = ERROR_TYPES[name]("message", remedy="remedy", about={"tensor": "w", "shape": (1, 2)})
    back = Failure.from_json(error.failure().to_json()).error()
    assert type(back) is type(error)
    assert (str(back), back.reason, back.about, back.retryable) == (
        "message; remedy",
        error.reason,
        {"tensor": "w", "shape": "(1, 2)"},
        error.retryable,
    )


def test_a_reason_of_a_newer_peer_is_kept_readable() -> None:
    error = Failure(reason="FROM_THE_FUTURE", message="m").error()
    assert error.reason == "INTERNAL"
    assert "FROM_THE_FUTURE" in str(error)


def test_an_undeclared_reason_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="NONESUCH"):
        ModelExportError("m", reason="NONESUCH")
