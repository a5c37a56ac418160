"""The compiled kernel: bit for bit what it says it computes, on each kind of vectors that this processor has."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from slipway.errors import ModelMergeError
from slipway.machine.compiled.library import load_library
from slipway.stage import Context
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from slipway_merge.tensors import deltas
from slipway_merge.tensors.kernel import FOLDER, Block, Kernel, kernel
from slipway_merge.tensors.tensor_io import FLOAT_TYPES

BF16 = FLOAT_TYPES["BF16"]
OLDER = {"avx512": ["avx512", "avx2"], "avx2": ["avx2"], "neon": ["neon"]}

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def usable() -> list[Kernel]:
    loaded, best = load_library(FOLDER), kernel()
    assert loaded, "not compiled: make install"
    assert best, "this processor has no fused multiply-add"
    return [Kernel(loaded, name) for name in OLDER[best.name]]


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded by torch, which is not what is tested."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy().view(BF16)


def merged(one: Kernel, base: np.ndarray, left: np.ndarray, right: np.ndarray):
    out = np.full(base.shape, 7, BF16)
    return out, one.merge(base, left, one.panels(right), out=out)


def expected(base: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Fused multiply-adds in the order of the rank, each rounded to float32 once: in a type that holds their results exactly."""
    total = np.zeros(base.shape, np.float32)
    for k in range(left.shape[1]):
        product = left[:, k : k + 1].astype(np.longdouble) * right[k : k + 1].astype(np.longdouble)
        total = (product + total).astype(np.float32)
    return as_bfloat16(base.astype(np.float32) + total)


@pytest.mark.parametrize("shape", [(1, 1), (1, 32), (8, 64), (7, 33), (17, 31), (23, 257)], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_bit_for_bit(shape, rank):
    random = np.random.default_rng(rank)
    base = as_bfloat16(random.standard_normal(shape, np.float32))
    left = random.standard_normal((shape[0], rank), np.float32) * np.float32(0.1)
    right = random.standard_normal((rank, shape[1]), np.float32)
    want = expected(base, left, right)
    wide = base.astype(np.float64)
    for one in usable():
        out, counts = merged(one, base, left, right)
        assert np.array_equal(out.view(np.uint16), want.view(np.uint16)), one.name
        again = base.copy()
        one.merge(again, left, one.panels(right), out=again)
        assert np.array_equal(again.view(np.uint16), want.view(np.uint16)), f"{one.name} in place"
        assert counts.changed == (want != base).sum()
        assert counts.weight_sum == pytest.approx((wide * wide).sum(), rel=1e-5)
        assert counts.finite


def test_ties_go_to_even():
    """Every bfloat16 from 1 to 2, plus exactly half of the distance to the next."""
    base = np.arange(0x3F80, 0x4000, dtype=np.uint16).view(BF16).reshape(4, 32)
    left, right = np.ones((4, 1), np.float32), np.full((1, 32), 2.0**-8, np.float32)
    for one in usable():
        out, _ = merged(one, base, left, right)
        assert np.array_equal(out.view(np.uint16), (base.view(np.uint16) + 1) & ~np.uint16(1))


def test_zeros_of_either_sign_are_the_same():
    base = np.array([[-0.0, 0.0, 1.0, -1.0]], np.float32).astype(BF16)
    zeros = np.zeros((1, 1), np.float32), np.zeros((1, 4), np.float32)
    for one in usable():
        _, counts = merged(one, base, *zeros)
        assert counts.changed == 0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3.4e38])
@pytest.mark.parametrize("place", [(0, 0), (8, 32), (10, 40)])
def test_what_is_not_finite_is_seen(bad, place):
    """Find it at any place, and if only rounding makes it so (3.4e38 is above the largest bfloat16)."""
    base, left, right = np.zeros((11, 41), BF16), np.zeros((11, 1), np.float32), np.ones((1, 41), np.float32)
    left[place[0]] = bad
    for one in usable():
        assert merged(one, base, np.zeros_like(left), right)[1].finite
        base[place] = bad
        assert not merged(one, base, np.zeros_like(left), right)[1].finite
        base[place] = 0
        assert not merged(one, base, left, right)[1].finite


class OneUpdate:
    """A low-rank update whose factors are at hand."""

    def __init__(self, left: np.ndarray, right: np.ndarray) -> None:
        self._factors = left, right

    def factors(self):
        return self._factors

    def panels(self, one: Kernel):
        return one.panels(self._factors[1])

    def square(self) -> float:
        return 1.0


def test_overflow_is_named():
    base = np.full((2, 3), 3e38, np.float32).astype(BF16)
    update = OneUpdate(np.ones((2, 1), np.float32), np.full((1, 3), 3e38, np.float32))
    with pytest.raises(ModelMergeError, match="'w' of the merged result holds NaN or infinity") as caught:
        deltas.merge_block(
            base,
            update,
            first_row=0,
            source="BF16",
            output="BF16",
            block=Block(),
            change=deltas.Change("m", "w"),
        )
    assert caught.value.reason == "NON_FINITE_WEIGHTS"


def test_without_the_kernel_the_same_but_for_near_ties(make_case, monkeypatch):
    case = make_case("llama", torch.bfloat16, target_modules="all-linear")
    results, facts = [], []
    for name, found in (("with", kernel()), ("without", None)):
        monkeypatch.setattr(deltas, "kernel", lambda found=found: found)
        ctx = Context(workdir=case.workdir / name)
        ctx.workdir.mkdir()
        out = STAGE.run({"base": case.base, "adapter": case.adapter}, MergeParams(verify="spot"), ctx)["pytorch"]
        results.append(np.fromfile(out / "model.safetensors", np.int16))
        facts.append(ctx.facts)
    different = results[0] != results[1]
    assert different.mean() < 1e-3
    assert np.abs(results[0][different] - results[1][different]).max(initial=0) <= 1
    assert [fact["arithmetic"] for fact in facts] == [kernel().name, "numpy"]
    for one, other in zip(facts[0]["modules"], facts[1]["modules"], strict=True):
        assert one["relative_change"] == pytest.approx(other["relative_change"], rel=1e-4)
