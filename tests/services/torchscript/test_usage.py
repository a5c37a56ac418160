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
EXAMPLES = {row.name: row for row in ROWS if row.name in ("Qwen3", "BERT, classes", "MiniLM, features")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_the_card_run(tmp_path: Path, export: Export, name: str) -> None:
    source = make_row(EXAMPLES[name], tmp_path / "source")
    folders = ("torchscript", "torch_export")
    for stage in folders:
        export(source, stage)
    write_report(tmp_path, result=result(None, folders))
    examples = usage_examples((tmp_path / "README.md").read_text())
    for stage in folders:
        code = examples[stage]
        assert "transformers" not in code
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
