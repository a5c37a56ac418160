"""Sizes in bytes, read and written."""

from __future__ import annotations

import pytest

from slipway.sizes import format_size, parse_size
from slipway.texts import MalformedText


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1 << 30, "1.1 GB"), (-1500, "-1.5 kB"), (2.5e15, "2500.0 TB")],
)
def test_a_size_is_written_in_decimal_units(count: float, said: str) -> None:
    assert format_size(count) == said


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 << 30), (" 1.5 kb ", 1500), ("7", 7), ("2T", 2 * 10**12), ("2PB", 2 * 10**15), ("1Pi", 1 << 50)],
)
def test_a_size_is_read_in_both_kinds_of_units(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "²", "9" * 400, "1 GiB|2", "0x10"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(MalformedText, match="is not a size") as refused:
        parse_size(text)
    assert refused.value.remedy == "write it like 8GiB or 8589934592"
