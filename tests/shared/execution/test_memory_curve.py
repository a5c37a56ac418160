"""Memory over time: few samples, however long an attempt takes, each at its time, and no peak is lost."""

from __future__ import annotations

import pytest

from slipway.execution.memory_curve import MOST_SAMPLES, MemoryCurve


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 1000, 86_400])
def test_it_keeps_the_shape_in_a_bounded_number_of_samples(count: int) -> None:
    curve = MemoryCurve(0.5)
    values = [1000 + number for number in range(count)]
    for number, value in enumerate(values):
        curve.add(value, 0.5 * number)
    found = curve.result()
    assert len(found.samples_bytes) <= MOST_SAMPLES
    joined = round(found.sample_seconds / 0.5)
    assert found.samples_bytes == tuple(max(values[at : at + joined]) for at in range(0, count, joined))


def test_a_peak_stays_wherever_it_is() -> None:
    for place in range(0, 300, 7):
        curve = MemoryCurve(0.5)
        for number in range(300):
            curve.add(9_000_000 if number == place else 5, 0.5 * number)
        assert max(curve.result().samples_bytes) == 9_000_000


def test_measurements_that_come_late_stand_at_their_time() -> None:
    curve = MemoryCurve(0.5)
    for value, at in ((10, 0.0), (20, 0.7), (30, 3.2), (5, 3.4), (40, 5.0)):
        curve.add(value, at)
    assert curve.result().samples_bytes == (10, 20, 20, 20, 20, 20, 30, 30, 30, 30, 40)
    curve.add(1, 1000.0)
    found = curve.result()
    assert found.sample_seconds * len(found.samples_bytes) == pytest.approx(1000.0, abs=found.sample_seconds)
