"""The usage examples of the card, run as readers copy them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipway.results.report import write_report
from support.commands.report_parts import result
from support.commands.usage_examples import usage_examples
from support.models.table_models import ROWS, make_row

from .conftest import Export

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "name"),
    [("torchscript", "Qwen3"), ("torchscript", "MiniLM, features"), ("torch_export", "BERT, classes")],
)
def test_the_example_of_the_card_runs(tmp_path: Path, export: Export, stage: str, name: str) -> None:
    """With a chat template both run where all formats are exported at once."""
    export(make_row(next(row for row in ROWS if row.name == name), tmp_path / "source"), stage)
    write_report(tmp_path, result=result(None, (stage,)))
    code = usage_examples((tmp_path / "README.md").read_text())[stage]
    assert "transformers" not in code
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
