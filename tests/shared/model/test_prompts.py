"""The prompts of a sentence encoder are those that sentence-transformers would put before a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipway.model.tokens.prompts import Prompts, read_prompts
from support.models.sentence_models import write_prompts


@pytest.mark.parametrize(
    ("texts", "default", "question", "passage"),
    [
        ({}, None, "", ""),
        ({"query": "", "document": ""}, None, "", ""),
        ({"query": "q: ", "document": "d: "}, None, "q: ", "d: "),
        ({"query": "q: ", "passage": "p: "}, None, "q: ", "p: "),
        ({"query": "q: "}, "query", "q: ", ""),
        ({"document": "d: ", "corpus": "c: "}, None, "", "d: "),
        ({"STS": "s: "}, None, "", ""),
        ({"STS": "s: "}, "STS", "s: ", "s: "),
        ({"STS": "s: "}, "other", "", ""),
    ],
)
def test_what_comes_before_a_question_and_a_passage(
    texts: dict[str, str], default: str | None, question: str, passage: str, tmp_path: Path
) -> None:
    prompts = read_prompts(write_prompts(tmp_path, texts, default))
    assert (prompts.question, prompts.passage) == (question, passage)


@pytest.mark.parametrize(
    "settings",
    ["", "[]", "{", {"prompts": []}, {"prompts": {"query": 1, "": "x", "n" * 101: "x", "long": "x" * 1001}}, {"prompts": None}],
)  # fmt: skip
def test_what_is_no_prompt_is_none(settings: Any, tmp_path: Path) -> None:
    text = settings if isinstance(settings, str) else json.dumps(settings)
    (tmp_path / "config_sentence_transformers.json").write_text(text)
    assert read_prompts(tmp_path) == Prompts({})
    assert read_prompts(tmp_path / "missing") == Prompts({})
