"""Reasons are an interface: every one used is declared, every one declared is documented."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from slipway.errors import ERROR_TYPES, REASONS, Failure, ModelExportError

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("shared", "services") for path in sorted((ROOT / folder).rglob("*.py"))]


def reasons_in(path: Path) -> set[str]:
    """Every literal given as ``reason=`` in a file."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    values = (keyword.value for call in calls for keyword in call.keywords if keyword.arg == "reason")
    return {v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str) and v.value.isupper()}


def test_every_reason_used_is_declared() -> None:
    used = {reason: path for path in SOURCES for reason in reasons_in(path)}
    assert used
    assert {reason: path for reason, path in used.items() if reason not in REASONS} == {}


def test_every_declared_reason_is_used() -> None:
    text = "\n".join(path.read_text() for path in SOURCES if path.name != "errors.py")
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
