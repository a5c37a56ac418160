"""Texts of other people: clean where they are shown, short in messages."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway.errors import MOST_TEXT, ServiceError
from slipway.texts import escaped_json, hidden_character, number_of, one_line, printable, quoted, shortened
from support.hostile.texts import DECEPTIVE, TEXTS

PLAIN = ("qwen3-4b", "modèle", "模型 3", "ü", "نموذج", "می‌خواهم", "👩‍👩‍👧", "❤️", "a b", "क्‍ष", "🏳️‍🌈", "½ · “x”")


@pytest.mark.parametrize("text", PLAIN)
def test_names_of_every_script_stay_as_they_are(text: str) -> None:
    assert printable(text) == one_line(text) == text
    assert hidden_character(text) == ""


@pytest.mark.parametrize("text", DECEPTIVE)
def test_what_is_not_shown_as_it_is_is_found_replaced_and_escaped(text: str) -> None:
    assert hidden_character(text).startswith("U+")
    assert hidden_character(one_line(text)) == ""
    document = json.dumps({text: text}, ensure_ascii=False)
    assert json.loads(escaped_json(document)) == {text: text}
    assert escaped_json(document).encode()
    assert escaped_json(document) == printable(escaped_json(document))


@given(st.text(st.characters()) | st.sampled_from(TEXTS))
def test_any_text_is_clean_after_one_pass(text: str) -> None:
    cleaned = one_line(text)
    assert hidden_character(cleaned) == ""
    assert one_line(cleaned) == cleaned
    assert printable(printable(text)) == printable(text)
    assert len(printable(text)) == len(text), "tables measure it before and after"


@given(
    st.recursive(
        st.integers() | st.text() | st.floats() | st.binary(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_value_is_quoted_on_one_short_line(value: Any) -> None:
    assert len(quoted(value)) <= 200
    assert hidden_character(quoted(value)) == ""


def test_a_large_value_is_quoted_without_being_written_out() -> None:
    inner: list[Any] = ["x"] * 1000
    for _ in range(20):
        inner = [inner] * 1000
    began = time.process_time()
    for value in (inner, "x" * 50_000_000, 10**100_000, dict.fromkeys(range(1000), inner)):
        assert len(quoted(value)) <= 200
    assert time.process_time() - began < 20, "and not the hours of writing it out"
    assert quoted(10**5000) == "a number of 5000 digits"
    assert quoted("short") == "'short'"


@pytest.mark.parametrize("most", [1, 20, 50, 200])
def test_a_shortened_text_keeps_both_ends(most: int) -> None:
    assert shortened("x" * most, most) == "x" * most
    cut = shortened("begin" + "x" * 10_000 + "end", most)
    if most >= 50:
        assert len(cut) <= most
        assert cut.startswith("begin")
        assert cut.endswith("end")


def test_every_error_has_bounds() -> None:
    error = ServiceError("m" * 10**7, reason="REQUEST_INVALID", remedy="r" * 10**7, about={"field": "f" * 10**7})
    assert max(map(len, (error.message, error.remedy, error.about["field"]))) == MOST_TEXT
    assert len(str(error)) < 3 * MOST_TEXT


@pytest.mark.parametrize("text", ["", "²", "٣", "-1", "+1", " 1", "1.0", "1e3", "0x1", "1_0", "8" * 10_000, "1001"])
def test_what_is_no_count_is_none(text: str) -> None:
    assert number_of(text, most=1000) is None


def test_counts_are_counts() -> None:
    assert [number_of(text, most=1000) for text in ("0", "7", "0007", "1000", "0" * 9000 + "1")] == [0, 7, 7, 1000, 1]
    assert sys.get_int_max_str_digits() == 4300, "the limit that this goes around is in place"
