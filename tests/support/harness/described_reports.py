"""Validate every ``report.json`` that a test writes below a folder of its fixtures against the published schema.

Files that are no reports of this version, because a test damaged or invented them, are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_seen: dict[Path, int] = {}
"""When each report was changed that was looked at: folders of a module's fixtures are looked into after each of its tests."""
of_another_version: set[Path] = set()
"""Folders with reports that another version has written, whose schema is another."""
SCHEMA = Path(__file__).parents[3].resolve() / "shared" / "slipway" / "results" / "report" / "report.schema.json"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the test, then look at what it left."""
    result = yield
    for path in new_reports(getattr(item, "funcargs", {}).values()):
        if not of_another_version.intersection(path.parents):
            check_report(path)
    return result


def new_reports(fixtures: Iterable[object]) -> list[Path]:
    """Return the reports below the fixtures that are folders, without those that an earlier test of the module looked at."""
    folders = [folder for folder in fixtures if isinstance(folder, Path) and folder.is_dir()]
    found = {path: path.stat().st_mtime_ns for folder in folders for path in sorted(folder.rglob("report.json"))}
    new = [path for path, changed in found.items() if _seen.get(path) != changed]
    _seen.update(found)
    return new


def check_report(path: Path) -> None:
    """Fail if a file is a report that the schema does not describe."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if not isinstance(document, dict) or not {"schema_version", "result", "validation", "lineage"} <= document.keys():
        return
    found = [f"{error.json_path}: {error.message[:300]}" for error in _validator().iter_errors(document)]
    assert found == [], f"{path} is not as report.schema.json says"


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(closed(json.loads(SCHEMA.read_text(encoding="utf-8"))))


def closed(schema: Any) -> Any:
    """Return the schema with no room for fields that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return inner | ({"additionalProperties": False} if "properties" in inner and "required" in inner else {})
