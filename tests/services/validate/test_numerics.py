"""Distances between logits, against values worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway.proof import numerics
from slipway.proof.numerics import (
    Block,
    LogitComparer,
    adapter_strength,
    common_prefix,
    logit_scale,
    perplexity_of,
    window_losses,
)


def logs(*probabilities: float) -> np.ndarray:
    return np.log(np.array([probabilities], dtype=np.float64)).astype(np.float32)


def compared(other: np.ndarray, own: np.ndarray):
    comparer = LogitComparer()
    comparer.add(other, own)
    return comparer.result()


def test_kl_of_two_coins() -> None:
    # 3/4 log((3/4)/(1/2)) + 1/4 log((1/4)/(1/2)) = 3/4 log 3 - log 2
    expected = 0.75 * math.log(3) - math.log(2)
    assert compared(logs(0.75, 0.25), logs(0.5, 0.5)).mean_kl == pytest.approx(expected, rel=1e-6)


def test_kl_is_from_other_to_own_not_the_reverse() -> None:
    result = compared(logs(0.75, 0.25), logs(0.5, 0.5))
    backwards = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert result.mean_kl == pytest.approx(0.75 * math.log(3) - math.log(2), rel=1e-6)
    assert result.mean_kl != pytest.approx(backwards, rel=1e-2)


def test_softmax_does_not_overflow_and_ignores_a_shift() -> None:
    logits = np.array([[1000.0, 1000.0, 999.0]], dtype=np.float32)
    block, shifted = Block(logits), Block(logits - 1000)
    (_, weights), (_, of_shifted) = block.part(slice(None)), shifted.part(slice(None))
    assert weights.sum() / block.total[0] == pytest.approx(1)
    assert np.allclose(weights, of_shifted)
    assert block.log_total()[0] == pytest.approx(shifted.log_total()[0] + 1000)


def test_figures_over_several_windows() -> None:
    comparer = LogitComparer()
    comparer.add(np.array([[0, 1], [2, 0]], dtype=np.float32), np.array([[0, 1], [2, 0]], dtype=np.float32))
    comparer.add(np.array([[0, 1], [0, 1]], dtype=np.float32), np.array([[1, 0], [0, 3]], dtype=np.float32))
    result = comparer.result()
    assert result.tokens == 4
    assert result.max_abs_diff == 2
    assert result.mean_abs_diff == pytest.approx((1 + 1 + 2) / 8)
    assert result.top1_agreement == 0.75
    # softmax(0, 1) = (a, b), a = 1/(1+e): KL of (a, b) from (b, a) is (b - a)(log b - log a) = b - a
    a = 1 / (1 + math.e)
    b = 1 - a
    three = 1 / (1 + math.exp(3))
    second = a * math.log(a / three) + b * math.log(b / (1 - three))
    assert result.kl_per_window == (0.0, pytest.approx((b - a + second) / 2))
    assert result.mean_kl == pytest.approx((b - a + second) / 4)
    assert result.max_kl == pytest.approx(max(b - a, second))


@pytest.mark.parametrize(("block", "part"), [(3 * 20, 1 << 14), (3 * 20, 7 * 3), (1 << 17, 50 * 6)])
def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, block: int, part: int) -> None:
    random = np.random.default_rng(0)
    other, own = (random.normal(size=(50, 20)).astype(np.float32) for _ in range(2))
    tokens = random.integers(0, 20, 50)
    whole = compared(other, own), perplexity_of(window_losses(own[None], tokens[None, 1:]))
    monkeypatch.setattr(
        numerics, "BLOCK_VALUES", block
    )  # three rows or all, seven columns, six or all: a test needs small ones
    monkeypatch.setattr(numerics, "PART_VALUES", part)
    parts = compared(other, own), perplexity_of(window_losses(own[None], tokens[None, 1:]))
    assert parts[0].mean_kl == pytest.approx(whole[0].mean_kl, rel=1e-12)
    assert parts[0].max_abs_diff == whole[0].max_abs_diff
    assert parts[1] == pytest.approx(whole[1], rel=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_not_hidden(value: float) -> None:
    own = np.zeros((3, 4), dtype=np.float32)
    own[1, 2] = value
    result = compared(np.zeros((3, 4), dtype=np.float32), own)
    assert result.max_abs_diff is None
    assert result.mean_kl is None


def test_shapes_have_to_agree() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2\) and \(1, 3\)"):
        compared(np.zeros((1, 2), dtype=np.float32), np.zeros((1, 3), dtype=np.float32))
    with pytest.raises(ValueError, match="no logits"):
        LogitComparer().result()


def test_perplexity_by_hand() -> None:
    # p(x1 = 0 | x0) = 1/2, p(x2 = 1 | x0 x1) = 1/8: mean nll = log(16) / 2, perplexity 4. The last row predicts nothing.
    logits = np.concatenate([logs(0.5, 0.5), logs(0.875, 0.125), logs(0.9, 0.1)])[None]
    assert perplexity_of(window_losses(logits, np.array([[0, 1]]))) == pytest.approx(4, rel=1e-6)


def test_perplexity_of_a_uniform_model_is_its_vocabulary() -> None:
    assert perplexity_of(window_losses(np.zeros((3, 5, 7), np.float32), np.zeros((3, 4), np.int64))) == pytest.approx(7)


def test_perplexity_beyond_all_bounds_is_none() -> None:
    logits = np.array([[[0.0, 3000.0], [0.0, 3000.0]]], dtype=np.float32)
    assert perplexity_of(window_losses(logits, np.array([[0]]))) is None


def test_logit_scale() -> None:
    assert logit_scale(np.full((1, 2, 3), -4, dtype=np.float32)) == pytest.approx(4)
    assert logit_scale(np.full((1, 2, 3), 0.1, dtype=np.float32)) == 1


def test_adapter_strength_is_the_share_of_its_effect() -> None:
    random = np.random.default_rng(0)
    base, effect, noise = (random.normal(size=(2, 40, 60)).astype(np.float32) for _ in range(3))
    reference = base + effect
    assert adapter_strength(base, reference, reference) == pytest.approx(1)
    assert adapter_strength(base, reference, base) == pytest.approx(0)
    assert adapter_strength(base, reference, base + np.float32(1.5) * effect) == pytest.approx(1.5, rel=1e-5)
    # A shift of all logits of a position changes no probability, and noise as large as the effect hardly matters.
    assert adapter_strength(base, reference, reference + 7) == pytest.approx(1, abs=1e-5)
    assert adapter_strength(base, reference, reference + noise) == pytest.approx(1, abs=0.05)
    assert adapter_strength(base, base, base) is None
    assert adapter_strength(base, reference, np.full_like(base, np.nan)) is None


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=8), st.integers(0, 7))
def test_kl_is_never_negative_and_zero_only_for_the_same(values: list[float], place: int) -> None:
    other = np.array([values], dtype=np.float32)
    own = other.copy()
    assert compared(other, own).mean_kl == pytest.approx(0, abs=1e-12)
    own[0, place % len(values)] += 1
    result = compared(other, own).mean_kl
    assert result is not None
    assert result >= 0
