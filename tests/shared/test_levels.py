"""Levels: each says itself which wider bits some of its weights may have, so that a new one changes no other."""

from __future__ import annotations

import pytest

from slipway.levels import LEVELS, WIDTHS, widths_of


@pytest.mark.parametrize(
    ("level", "widths"),
    [("int8", (8,)), ("int4", (4, 8)), ("int3", (3, 4, 8)), ("nvfp4", ()), ("bf16", ()), ("nonsense", ())],
)
def test_the_widths_of_a_level(level: str, widths: tuple[int, ...]) -> None:
    assert widths_of(level) == widths


def test_wider_bits_are_wider_and_those_of_a_level() -> None:
    for each in LEVELS.values():
        assert set(each.wider) <= set(WIDTHS)
        assert all(bits > (each.bits or 8) for bits in each.wider)
