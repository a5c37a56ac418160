"""The table of families in the README: every family is in it, it shows the committed results, and they are what exports give."""

from __future__ import annotations

import pytest

from slipway_coordinator.model.rules import default_rules
from support.models.onnx_table import (
    BEGIN,
    END,
    LIMIT,
    README,
    WRITES,
    add_results,
    cells,
    outcome,
    read_results,
    render,
    run_row,
)
from support.models.table_models import ROWS, Row

SAMPLE: tuple[object, ...] = (
    ("Qwen3", "mobius 14"),
    ("Gemma 3, window", "mobius 17"),
    ("Qwen3-MoE", "mobius 18"),
    ("GPT-2", "legacy 17"),
    pytest.param("Marian, two vocabularies", "legacy 14", marks=pytest.mark.slow),
    pytest.param("MiniLM, features", "dynamo 18", marks=pytest.mark.slow),
)


def test_the_readme_shows_the_results() -> None:
    section = README.read_text().partition(BEGIN)[2].partition(END)[0]
    assert section == render(read_results())
    assert len(ROWS) >= 30
    for row in ROWS:
        assert f"| {row.name} |" in section


def test_every_result_is_a_parity_or_a_recovery_that_ends_in_one() -> None:
    rules = {rule.name for rule in default_rules().rules}
    table = read_results()
    assert table.keys() <= {row.name for row in ROWS}
    for results in table.values():
        assert results.keys() <= {f"{engine} {opset}" for engine, opset in cells()}
        for cell, result in results.items():
            assert result["attempts"][0] == cell.split()[0]
            assert set(result["attempts"][::2]) <= WRITES.keys()
            assert set(result["attempts"][1::2]) <= rules
            assert 0 <= max(result["differences"]) < LIMIT
            assert len(result["differences"]) == 2
            fixed = result["static"]
            assert fixed["attempts"][0] == cell.split()[0]
            assert set(fixed["attempts"][::2]) <= WRITES.keys()
            assert set(fixed["attempts"][1::2]) <= rules
            assert 0 <= fixed["differences"][0] < LIMIT


@pytest.mark.parametrize(("family", "cell"), SAMPLE)
def test_a_sample(family: str, cell: str) -> None:
    row = next(row for row in ROWS if row.name == family)
    ((_, result),) = run_row(row, only=(cell,))
    assert outcome(result) == outcome(read_results()[family][cell])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_family_whole(row: Row) -> None:
    """Results that the README lacks are added to it; others must be those of this run."""
    known = read_results().get(row.name, {})
    for cell, result in run_row(row):
        if cell in known:
            assert outcome(result) == outcome(known[cell]), cell
        else:
            add_results(row, {cell: result})
