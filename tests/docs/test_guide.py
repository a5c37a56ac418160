"""What the guide tells people to type is what the command takes: formats, settings, reasons, flags and commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from slipway.cli.app import app
from slipway.configuration.flags import read_requested, read_text
from slipway.configuration.layers import Layer
from slipway.reasons import REASONS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("[!a]*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]
GUIDE = [ROOT / "docs" / name for name in ("quickstart.md", "coming-from.md", "troubleshooting.md", "installing.md")]


def found(pattern: str, pages: list[Path] = PAGES) -> Iterator[tuple[str, str]]:
    for page in pages:
        for each in re.findall(pattern, page.read_text(encoding="utf-8")):
            yield page.name, each


FORMATS = sorted(set(found(r"(?<![\w-])-f ([a-z][\w:+,.=]*\w)(?![\w./-]*/)")))
SETTINGS = sorted(set(found(r"--set ([a-z_]+\.[\w.]+=[^\s`]+)")))


@pytest.mark.parametrize(("page", "words"), FORMATS, ids=str)
def test_formats_that_a_page_names_can_be_asked_for(page: str, words: str) -> None:
    layer = Layer()
    read_requested([words], layer)
    assert layer.problems == [], page


@pytest.mark.parametrize(("page", "words"), SETTINGS, ids=str)
def test_settings_that_a_page_names_are_there(page: str, words: str) -> None:
    key, _, value = words.partition("=")
    if "…" in value:
        pytest.skip("the reader's own value")
    layer = Layer()
    read_text(layer, key, value, "--set")
    assert layer.problems == [], page


def test_reasons_in_the_guide_are_declared() -> None:
    named = {
        reason: page for page, reason in found(r"`([A-Z][A-Z]+_[A-Z_]+)`", GUIDE) if not reason.startswith("SLIPWAY")
    }
    assert len(named) >= 5
    assert {reason: page for reason, page in named.items() if reason not in REASONS} == {}


def test_commands_that_a_page_names_are_there() -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = {(page, word) for page, word in found(r"^ *\$ (?:\S*/)?slipway ([a-z][a-z-]*)|`slipway ([a-z][a-z-]*)")}
    words = {(page, one or other) for page, (one, other) in named}  # type: ignore[misc]
    assert {word for _, word in words} >= {"export", "doctor", "recommend"}
    assert {(page, word) for page, word in words if word not in commands} == set()
