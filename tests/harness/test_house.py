"""The house stays one that a reader can hold: folders of few modules, modules of few lines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
MOST_MODULES = 15
MOST_LINES = 400
MOST_MEDIAN = 180
MOST_PER_THOUSAND_LINES = 7.0


@pytest.fixture(scope="module")
def modules() -> list[Path]:
    """Modules of the product; a package's own file says what is in it, and is none of them."""
    found = [path for part in ("shared", "services") for path in sorted((ROOT / part).rglob("slipway*/**/*.py"))]
    assert len(found) > 300
    return [path for path in found if path.name != "__init__.py"]


def test_no_folder_holds_more_modules_than_one_can_read(modules: list[Path]) -> None:
    folders = Counter(path.parent.relative_to(ROOT).as_posix() for path in modules)
    assert {folder: count for folder, count in folders.items() if count > MOST_MODULES} == {}


def test_no_module_is_longer_than_one_can_read(modules: list[Path]) -> None:
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in modules}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
    assert median(lines.values()) <= MOST_MEDIAN


def test_lines_are_not_scattered_over_many_modules(modules: list[Path]) -> None:
    lines = sum(len(path.read_text().splitlines()) for path in modules)
    assert 1000 * len(modules) / lines <= MOST_PER_THOUSAND_LINES


def test_every_package_says_what_is_in_it(modules: list[Path]) -> None:
    packages = {path.parent / "__init__.py" for path in modules}
    assert [
        path.relative_to(ROOT).as_posix() for path in sorted(packages) if not path.read_text().startswith('"""')
    ] == []
