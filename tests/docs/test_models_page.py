"""The table of models is what whole exports gave: a kind that is run again ends as the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models.current_kinds import KINDS
from support.models.kinds_table import BEGIN, END, PAGE, SIGNS, read_results, render, run_kind


def test_the_page_shows_the_results_as_they_are() -> None:
    results = read_results()
    assert results
    assert results.keys() <= KINDS.keys()
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown == render(results)


def test_nothing_fails() -> None:
    """What cannot be made is refused with a reason, or not run."""
    states = {(kind, output): cell["state"] for kind, row in read_results().items() for output, cell in row.items()}
    assert [each for each, state in states.items() if state == "failed"] == []
    assert {*states.values()} <= SIGNS.keys()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # every format, for which a slow machine takes more than the usual time
@pytest.mark.parametrize("kind", ["lfm2", "qwen3-asr"])
def test_a_kind_ends_as_the_table_says(kind: str, tmp_path: Path) -> None:
    found = run_kind(kind, tmp_path)
    wanted = read_results()[kind]
    assert {output: cell["state"] for output, cell in found.items()} == {
        output: cell["state"] for output, cell in wanted.items()
    }
