"""Ranges from counted magnitudes."""

from __future__ import annotations

import numpy as np
import pytest

from slipway_quantize.activations.ranges import BINS, RANGE_METHODS, Histogram


def counted(*parts: np.ndarray) -> Histogram:
    histogram = Histogram()
    for part in parts:
        histogram.add(part.astype(np.float32))
    return histogram


@pytest.mark.parametrize("method", RANGE_METHODS)
def test_the_order_of_the_values_does_not_matter(method: str) -> None:
    values = np.random.default_rng(0).normal(size=(4, 50_000)) * np.array([[1], [300], [0.01], [7]])
    assert counted(*values).range(method) == counted(*values[::-1]).range(method) == counted(values).range(method)


def test_the_largest_magnitude_is_exact() -> None:
    assert counted(np.array([0.5, -3.25]), np.zeros(3)).range("minmax") == 3.25


def test_a_percentile_leaves_single_outliers_out() -> None:
    values = np.random.default_rng(0).uniform(-1, 1, 1_000_000)
    values[:5] = 40.0
    found = counted(values)
    assert found.range("percentile") == pytest.approx(1.0, abs=64 / BINS)
    assert found.range("minmax") == 40.0


def test_entropy_clips_long_tails_and_no_even_values() -> None:
    generator = np.random.default_rng(0)
    even, tailed = generator.uniform(-1, 1, 200_000), generator.standard_t(3, 200_000)
    assert counted(even).range("entropy") > 0.9
    found = counted(tailed)
    assert 2 < found.range("entropy") < found.range("minmax") / 2


@pytest.mark.parametrize("method", RANGE_METHODS)
def test_values_that_are_all_zero_have_no_range(method: str) -> None:
    assert counted(np.zeros(10)).range(method) == 0.0
