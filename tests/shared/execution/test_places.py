"""Failures name files by the task's inputs, and never by its scratch folder."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import Failure
from slipway.execution.failures import with_named_places


def test_files_are_named_by_the_input(tmp_path: Path) -> None:
    inputs = {"base": tmp_path / "inputs" / "base", "base_more": tmp_path / "inputs" / "base_more"}
    work = tmp_path / "work"
    failure = Failure(
        "FILE_ERROR",
        f"{inputs['base']}/config.json differs from {inputs['base_more']}/config.json, and {work}/out/a is there",
        remedy=f"look into {inputs['base']}",
        about={"file": f"{inputs['base_more']}/a.bin", "number": "3"},
    )
    named = with_named_places(failure, inputs=inputs, workdir=work)
    assert named.message == "base/config.json differs from base_more/config.json, and out/a is there"
    assert named.remedy == "look into base"
    assert named.about == {"file": "base_more/a.bin", "number": "3"}
    assert named.reason == failure.reason
