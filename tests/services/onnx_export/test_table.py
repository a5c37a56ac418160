"""The table of families in the README: every family is in it, it shows the committed results, and exports give those of a cell of each kind."""

from __future__ import annotations

import pytest

from slipway_coordinator.lifecycle.rules import default_rules
from support.models.onnx_table import (
    BEGIN,
    END,
    LIMIT,
    README,
    WRITES,
    cells,
    outcome,
    read_results,
    render,
    run_row,
)
from support.models.table_models import ROWS

SAMPLE = (
    ("Qwen3", "mobius 14"),
    ("Gemma 3, window", "mobius 17"),
    ("Qwen3-MoE", "mobius 18"),
    ("GPT-2", "legacy 17"),
)
OTHERS = {
    "mobius 14": ("Gemma", "StableLM", "GPT-J", "DeepSeek-V3", "M2M-100", "T5"),
    "mobius 17": ("OLMo 2", "Qwen2-MoE", "GPT-Neo", "Cohere", "Whisper", "DeBERTa v2, classes", "Qwen3, classes"),
    "mobius 18": ("Phi", "Phi-3", "Nemotron", "Bloom", "Cohere 2, window", "OLMoE"),
    "mobius 20": ("SmolLM3", "Granite", "MPT", "ModernBERT, masked"),
    "mobius 21": ("StarCoder2", "GPT-NeoX", "Gemma 2, window"),
    "mobius 23": ("Mixtral", "Falcon", "OPT"),
    "legacy 14": ("RoBERTa, questions",),
    "legacy 17": ("Marian", "BERT, masked"),
}
"""Where mobius writes no graph of a family, a cell of it shows the refusal and the tracer that its recovery takes instead."""
ALIKE = {
    **dict.fromkeys(("Qwen2", "Llama"), "Qwen3"),
    "Mistral, window": "Gemma 2, window",
    "GLM": "Cohere",
    **dict.fromkeys(("Marian, two vocabularies", "BART", "mBART", "Pegasus"), "Marian"),
    "mT5": "T5",
    "XLM-R, tokens": "RoBERTa, questions",
    **dict.fromkeys(
        (
            *("BERT, classes", "MiniLM, features", "DistilBERT, classes", "ALBERT, classes"),
            *("ELECTRA, tokens", "MPNet, features"),
        ),
        "BERT, masked",
    ),
    "Llama, classes": "Qwen3, classes",
}
"""Families whose exports go the way of another's, which is run; ``python -m support.models.onnx_table --again`` runs every cell."""


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


def test_every_family_is_run_or_ends_as_one_that_is() -> None:
    table = read_results()
    run = [family for family, _ in SAMPLE] + [family for families in OTHERS.values() for family in families]
    assert sorted([*run, *ALIKE]) == sorted(row.name for row in ROWS)
    for family, other in ALIKE.items():
        assert other in run
        ends, wanted = ({cell: outcome(found) for cell, found in table[name].items()} for name in (family, other))
        assert ends == wanted


@pytest.mark.parametrize(
    ("family", "cell"),
    [
        *SAMPLE,
        *(
            pytest.param(family, cell, marks=pytest.mark.slow)
            for cell, families in OTHERS.items()
            for family in families
        ),
    ],
)
def test_a_sample(family: str, cell: str) -> None:
    row = next(row for row in ROWS if row.name == family)
    ((_, result),) = run_row(row, only=(cell,))
    assert outcome(result) == outcome(read_results()[family][cell])
