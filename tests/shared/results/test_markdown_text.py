"""Text in the model card is shown as it is."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipway.results.report.environment import markdown_text
from support.commands.markdown import MARKDOWN, kinds, shown


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Z", "M"]), min_size=1))
@example("held-out text, 1 file(s)")
@example("1. a_b __c__ *d* `e` [f](g) <h> &amp; i|j ~~k~~ $l$ \\(m\\) \\")
@example("- a")
@example("C:\\_x")
def test_text_is_shown_as_it_is(text: str) -> None:
    expected = " ".join(text.split())
    rendered = MARKDOWN.parse(markdown_text(text))
    assert shown(rendered) == expected
    assert kinds(rendered) <= {"paragraph_open", "inline", "paragraph_close", "text", "text_special"}
    cell = MARKDOWN.parse(f"| a | b |\n|---|---|\n| {markdown_text(text)} | c |\n")
    assert shown(cell).split("\n") == ["a", "b", expected, "c"]


@pytest.mark.parametrize("text", ["held-out text, 1 file(s)", "pytorch-int4", "a_b (c) #1 {d} 50 % e! R&D", "x > 0.5"])
def test_text_that_is_no_markup_has_no_escapes(text: str) -> None:
    assert markdown_text(text) == text
