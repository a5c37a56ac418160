"""Conversations with calls of tools, and with thinking switched, become transformers' prompts in llama.cpp, or the shortest other one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from slipway.validation.texts import CONVERSATIONS, TextComparison
from slipway_gguf.runtime import load
from slipway_validate.judging import texts
from slipway_validate.protocol.messages import TextSpec
from slipway_validate.runner.texts import compare_texts, write_texts
from support.models.gguf_faults import faulty, save_models, write
from support.models.talking_templates import CHATML, COUNTS, PRINTS, REPEATS, SWITCHES, TALKS

pytestmark = pytest.mark.own_process

_JUDGED = sum(each.judged for each in CONVERSATIONS.values())
_FURTHER = len(CONVERSATIONS) - _JUDGED


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base, _, merged = save_models(tmp_path_factory.mktemp("models"))
    return base, merged


def compared(models: tuple[Path, Path], template: str, root: Path, *, stored: str = "") -> TextComparison:
    """Compare the prompts of a file that has ``stored`` as its template, or the model's."""
    for folder in models:
        (folder / "chat_template.jinja").write_text(template)
    base, merged = models
    file, expected = write(merged, root / "work"), root / "texts.json"
    if stored:
        file = faulty(file, root / "bad", fields={"tokenizer.chat_template": stored})
    write_texts(TextSpec(tokenizer=base, base=base, file=expected))
    found = compare_texts(load(file, threads=1), expected)
    assert found is not None
    return found


def test_calls_of_tools_and_switches_of_thinking_are_written_as_by_transformers(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    found = compared(models, TALKS, tmp_path)
    assert (found.conversations, found.rendered_otherwise) == (_JUDGED, 0), found
    assert (found.further, found.further_otherwise) == (_FURTHER, 0), found
    assert texts.notes(found) == ()


def test_a_difference_in_calls_of_tools_is_named_and_no_fault(models: tuple[Path, Path], tmp_path: Path) -> None:
    found = compared(models, TALKS, tmp_path, stored=REPEATS)
    assert all(check.passed for check in texts.checks(found))
    assert (found.further, found.further_otherwise) == (_FURTHER, 3)
    (said,) = texts.notes(found)
    assert f"3 of {_FURTHER} conversations with calls of tools" in said
    assert "the shortest is a tool's call and its result: " in said


def test_a_template_that_asks_whether_anybody_says_to_think_is_a_fault(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """llama.cpp always says it."""
    found = compared(models, COUNTS, tmp_path)
    assert (found.rendered_otherwise, found.conversations) == (_JUDGED, _JUDGED)
    assert found.first_rendered.startswith("a question: ")
    assert [check.name for check in texts.checks(found) if not check.passed] == ["chat_template"]


def test_a_template_that_llama_cpp_does_not_take_is_said(models: tuple[Path, Path], tmp_path: Path) -> None:
    found = compared(models, PRINTS, tmp_path)
    assert found.rendered_otherwise == _JUDGED
    assert "a question: llama.cpp's server does not begin" in found.first_rendered


def test_a_template_without_tools_and_thinking_has_no_further_conversations(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    found = compared(models, CHATML, tmp_path)
    assert (found.conversations, found.rendered_otherwise, found.further) == (_JUDGED - 1, 0, 0)


@pytest.mark.parametrize(("template", "known"), [(CHATML, True), (SWITCHES, False)], ids=["plain", "switched"])
def test_ollama_gets_no_template_that_lacks_the_switch_of_thinking(
    template: str, known: bool, models: tuple[Path, Path], tmp_path: Path
) -> None:
    _, merged = models
    (merged / "chat_template.jinja").write_text(template)
    folder = write(merged, tmp_path / "work")
    assert ("TEMPLATE " in (folder / "Modelfile").read_text()) is known
