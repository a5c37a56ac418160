"""Distances between values that are no logits, and choices that are as good as each other, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from slipway.model.families import Comparison
from slipway.proof.numerics import LogitComparer, adapter_strength
from slipway_validate.judging.compare import OtherModels, compare_together
from slipway_validate.judging.distances import VectorComparer, choose_measure, distance_of
from slipway_validate.runner.collect import NOWHERE, join_rows


def compared(other: list[list[float]], own: list[list[float]]):
    comparer = VectorComparer()
    comparer.add(np.array(other, dtype=np.float32), np.array(own, dtype=np.float32))
    return comparer.result()


def test_cosine_and_relative_error() -> None:
    found = compared([[3, 4], [1, 0]], [[3, 4], [0, 1]])
    assert found.tokens == 2
    assert found.cosine_distance == pytest.approx(0.5)  # 0 and 1
    assert found.max_cosine_distance == pytest.approx(1)
    assert found.relative_error == pytest.approx((2 / 26) ** 0.5)
    assert (found.max_abs_diff, found.mean_abs_diff) == (1, 0.5)
    assert found.mean_kl is None
    assert distance_of(found) == pytest.approx(2 / 26)


def test_a_score_has_no_direction() -> None:
    found = compared([[2.0], [-1.0]], [[2.0], [-0.5]])
    assert found.cosine_distance is None
    assert found.relative_error == pytest.approx((0.25 / 5) ** 0.5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_not_hidden(value: float) -> None:
    found = compared([[1, 2]], [[1, value]])
    assert (found.relative_error, found.max_abs_diff, found.cosine_distance) == (None, None, None)


def test_values_of_nothing() -> None:
    same = compared([[0, 0]], [[0, 0]])
    assert (same.relative_error, same.cosine_distance) == (0, 0)
    assert compared([[0, 0]], [[0, 1]]).cosine_distance == 1
    with pytest.raises(ValueError, match="no values"):
        VectorComparer().result()
    with pytest.raises(ValueError, match="shapes"):
        compared([[1, 2]], [[1, 2, 3]])


def test_a_near_tie_is_no_other_choice() -> None:
    other = np.log(np.array([[0.51, 0.49], [0.8, 0.2]], dtype=np.float32))
    comparer = LogitComparer()
    comparer.add(other, other[:, ::-1])
    found = comparer.result()
    assert (found.top1_agreement, found.choice_agreement) == (0, 0.5)


def test_what_is_measured_follows_the_comparison_and_the_width() -> None:
    assert choose_measure(Comparison.NEXT_TOKEN, width=100).many
    assert choose_measure(Comparison.CLASSES, width=3).logits
    assert not choose_measure(Comparison.CLASSES, width=1).logits
    assert not choose_measure(Comparison.EMBEDDINGS, width=32).logits


def test_a_shift_of_a_score_counts() -> None:
    base, reference = np.zeros((2, 1, 1), dtype=np.float32), np.ones((2, 1, 1), dtype=np.float32)
    assert adapter_strength(base, reference, reference + 1, centred=False) == pytest.approx(2)


def test_places_that_a_shorter_row_lacks_are_never_chosen() -> None:
    rows = join_rows([np.zeros((2, 3), dtype=np.float32), np.ones((2, 2), dtype=np.float32)])
    assert rows.shape == (4, 3)
    assert (rows[2:, 2] == NOWHERE).all()
    comparer = LogitComparer()
    comparer.add(rows, rows)
    assert comparer.result().mean_kl == 0


def test_windows_compared_side_by_side_give_the_figures_of_one_after_the_other() -> None:
    random = np.random.default_rng(3)
    reference, base, merged, own = (random.normal(size=(5, 9, 40)).astype(np.float32) for _ in range(4))
    labels = random.integers(0, 40, size=(5, 8))
    measure = choose_measure(Comparison.NEXT_TOKEN, width=40)
    others = OtherModels(reference=reference, base=base, merged=merged, labels=labels)
    one, three = (compare_together(own, others, measure, threads=threads) for threads in (1, 3))
    assert one == three
    whole = LogitComparer()
    for theirs, ours in zip(reference, own, strict=True):
        whole.add(theirs, ours)
    found, expected = one["to_reference"], whole.result()
    assert found.kl_per_window == expected.kl_per_window
    assert found.mean_abs_diff == pytest.approx(expected.mean_abs_diff)
    assert one["adapter_strength"] == pytest.approx(adapter_strength(base, reference, own))
    own[2, 3, 4] = np.nan
    broken = compare_together(own, others, measure, threads=3)
    assert broken["to_reference"].max_abs_diff is None
    assert broken["adapter_strength"] is None
