"""How far results are from the wanted ones."""

from __future__ import annotations

import numpy as np
import pytest

from slipway.proof.comparison import Difference, difference, largest_difference


def test_a_difference_is_a_share_of_the_largest_result() -> None:
    off = difference(np.array([1.0, -8.0], np.float32), np.array([1.0, -4.0], np.float32))
    assert (off.largest, off.scale, off.share) == (4.0, 4.0, 1.0)


def test_small_results_are_measured_on_a_scale_of_one() -> None:
    off = difference(np.array([0.25]), np.array([0.5]))
    assert (off.largest, off.scale, off.share) == (0.25, 1.0, 0.25)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_no_number_is_infinitely_far(value: float, side: int) -> None:
    pair = [np.zeros(3), np.zeros(3)]
    pair[side][1] = value
    assert difference(*pair).share == np.inf
    assert difference(*pair, overflow=True).share == np.inf


def test_the_same_overflow_on_both_sides_may_be_equal() -> None:
    one, other = np.array([np.inf, np.nan, 1.0]), np.array([np.inf, np.nan, 3.0])
    assert difference(one, other).share == np.inf
    assert difference(one, other, overflow=True) == Difference(2.0, 3.0)
    assert difference(one, np.array([-np.inf, np.nan, 3.0]), overflow=True).share == np.inf


def test_another_shape_is_infinitely_far() -> None:
    assert difference(np.zeros((2, 3)), np.zeros((3, 2))).share == np.inf


def test_values_of_16_bits_are_subtracted_in_32() -> None:
    off = difference(np.array([60000], np.float16), np.array([-60000], np.float16))
    assert off.largest == 120000


def test_nothing_differs_by_nothing() -> None:
    assert difference(np.zeros((0, 4)), np.zeros((0, 4))) == Difference(0.0, 1.0)
    assert largest_difference([]) == Difference(0.0, 1.0)


def test_the_largest_of_several_is_on_the_largest_scale() -> None:
    assert largest_difference([Difference(1.0, 8.0), Difference(2.0, 4.0)]) == Difference(2.0, 8.0)
