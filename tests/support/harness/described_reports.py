"""Validate every ``report.json`` that a test writes below its ``tmp_path`` against the published schema.

Files that are no reports of this version, because a test damaged or invented them, are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCHEMA = Path(__file__).parents[3].resolve() / "shared" / "slipway" / "results" / "report" / "report.schema.json"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the test, then look at what it left."""
    result = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if isinstance(folder, Path):
        for path in sorted(folder.rglob("report.json")):
            check_report(path)
    return result


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
