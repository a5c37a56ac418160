"""The compiled kernel: numpy's codes and scales bit for bit, on each kind of vectors that this processor has."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from slipway.errors import QuantizationError
from slipway.machine.compiled.library import load_library
from slipway_quantize.grid import rounding
from slipway_quantize.grid.rounding import FOLDER, Kernel, Rounded, Sums, kernel, round_weight
from slipway_quantize.grid.search import dequantize_groups, pack_codes, quantize_groups, steps_of

OLDER = {"avx512": ["avx512", "avx2"], "avx2": ["avx2"], "neon": ["neon"]}
TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

compiled = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def usable() -> list[Kernel]:
    loaded, best = load_library(FOLDER), kernel()
    assert loaded, "not compiled: make install"
    assert best, "this processor has no vectors that the kernel knows"
    return [Kernel(loaded, name) for name in OLDER[best.name]]


def check(weight: np.ndarray, *, bits: int, size: int, scale: type = np.float32) -> Sums | None:
    """Compare every kernel with numpy."""
    codes, scales = quantize_groups(weight, bits=bits, group_size=size, scale_dtype=np.dtype(scale))
    exact = weight.astype(np.float64)
    sums = None
    for one in usable():
        packed = np.full((len(weight), weight.shape[1] * bits // 8), 0xA5, np.uint8)
        found = np.full(scales.shape, np.nan, scale)
        sums = one.quantize(weight, steps_of(bits), bits=bits, packed=packed, scales=found)
        assert np.array_equal(packed, pack_codes(codes, bits=bits)), one.name
        assert found.tobytes() == scales.tobytes(), one.name
        assert sums.finite
        assert sums.fits
        assert sums.energy == pytest.approx(np.square(exact).sum(), rel=1e-5)
        assert sums.error == pytest.approx(np.square(dequantize_groups(codes, scales) - exact).sum(), rel=1e-4)
    return sums


@compiled
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_bit_for_bit(stored: str, size: int, bits: int) -> None:
    random = np.random.default_rng(size + bits)
    for rows, groups in ((1, 1), (3, 5), (17, 1), (33, 2)):
        weight = (random.standard_normal((rows, groups * size)) * 0.02).astype(TYPES[stored])
        check(weight, bits=bits, size=size)
        check(np.ascontiguousarray(weight.T).T, bits=bits, size=size)
        wider = np.zeros((groups * size, rows + 9), weight.dtype)
        wider[:, 4 : rows + 4] = weight.T
        check(wider[:, 4 : rows + 4].T, bits=bits, size=size)


@compiled
@pytest.mark.parametrize("scale", TYPES)
def test_scales_are_rounded_as_numpy_does(scale: str) -> None:
    """From subnormal to large: powers of two, and what lies around the ties between two scales."""
    exponents = np.arange(-30, 14, dtype=np.float32)
    weight = np.random.default_rng(0).standard_normal((len(exponents), 64), np.float32)
    check(weight * np.exp2(exponents)[:, None], bits=4, size=16, scale=TYPES[scale])
    steps = np.float32(1) + np.arange(512, dtype=np.float32) * np.float32(2**-13)
    check(np.repeat(-8 * steps[:, None], 16, 1) * np.float32(2**-17), bits=4, size=16, scale=TYPES[scale])


@compiled
def test_odd_weights() -> None:
    """Zeros of either sign, subnormal numbers, equal sizes of different signs, every 16-bit number."""
    for stored in TYPES.values():
        weight = np.zeros((6, 32), np.float32)
        weight[1] = -0.0
        weight[2, ::2], weight[2, 1::2] = 1, -1
        weight[3, ::2], weight[3, 1::2] = -1, 1
        weight[4, 5] = -3
        weight[5] = 1e-7
        check(weight.astype(stored), bits=4, size=32)
    tiny = np.array([[1e-45, -1e-42, 1e-39, -1e-38] * 8, [1e-37, -3e-37, 1e-36, 0] * 8], np.float32)
    check(tiny, bits=4, size=16)
    every = np.arange(1 << 16, dtype=np.uint16)
    for stored in (ml_dtypes.bfloat16, np.float16):
        values = every.view(stored)
        values = np.where(np.abs(values.astype(np.float32)) < 1e10, values, stored(1)).reshape(-1, 64)
        check(values, bits=8, size=64)


@compiled
@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_named(stored: str, bad: float) -> None:
    for place in ((0, 0), (6, 95), (16, 40)):
        weight = np.ones((17, 96), TYPES[stored])
        weight[place] = bad
        for layout in (weight, np.ascontiguousarray(weight.T).T):
            for one in usable():
                packed, scales = np.empty((17, 48), np.uint8), np.empty((17, 3), np.float32)
                assert not one.quantize(layout, steps_of(4), bits=4, packed=packed, scales=scales).finite
            with pytest.raises(QuantizationError, match="'w' has 1 NaN or infinite value") as caught:
                rounded(layout)
            assert caught.value.reason == "NON_FINITE_WEIGHTS"


@compiled
@pytest.mark.parametrize("stored", TYPES)
def test_the_largest_weights_are_finite(stored: str) -> None:
    """Their squares are not, in float32, or are those that infinity would have in float16."""
    largest = ml_dtypes.finfo(TYPES[stored]).max
    weight = np.full((17, 96), largest, TYPES[stored])
    for layout in (weight, np.ascontiguousarray(weight.T).T):
        for one in usable():
            packed, scales = np.empty((17, 48), np.uint8), np.empty((17, 3), np.float32)
            assert one.quantize(layout, steps_of(4), bits=4, packed=packed, scales=scales).finite


def rounded(weight: np.ndarray, scale: type = np.float32, bits: int = 4) -> Rounded:
    return round_weight(weight, bits=bits, group_size=32, scale_dtype=np.dtype(scale), name="w")


@pytest.mark.parametrize("with_kernel", [True, False])
def test_a_scale_beyond_its_type_is_named(monkeypatch: pytest.MonkeyPatch, *, with_kernel: bool) -> None:
    if not with_kernel:
        monkeypatch.setattr(rounding, "kernel", lambda: None)
    weight = np.ones((40, 64), np.float32)
    weight[33, 40] = 1e6
    assert np.isfinite(rounded(weight).scales).all()
    with pytest.raises(QuantizationError, match=r"'w' holds 1e\+06.* beyond the range of float16") as caught:
        rounded(weight, np.float16)
    assert caught.value.reason == "WEIGHT_OVERFLOW"


@compiled
@pytest.mark.parametrize("bits", [4, 8])
def test_without_the_kernel_the_same(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    random = np.random.default_rng(bits)
    weights = [
        random.standard_normal((300, 1024), np.float32),
        random.standard_normal((64, 9, 5), np.float32)[:, :, 2][:, :8].repeat(8, 1),
        random.standard_normal((32, 64)),  # float64
        random.standard_normal((64, 64), np.float32)[::2, ::-1],
    ]
    found = []
    for one in (kernel(), None):
        monkeypatch.setattr(rounding, "kernel", lambda one=one: one)
        found.append([rounded(weight, bits=bits) for weight in weights])
    for first, second in zip(*found, strict=True):
        assert np.array_equal(first.packed, second.packed)
        assert first.scales.tobytes() == second.scales.tobytes()
        assert first.error == pytest.approx(second.error, rel=1e-5)
        assert first.energy == pytest.approx(second.energy, rel=1e-5)
        assert np.array_equal(first.values(bits), second.values(bits))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_empty_weights(shape: tuple[int, int]) -> None:
    found = rounded(np.empty(shape, np.float32))
    assert (found.packed.size, found.scales.size, found.error, found.energy) == (0, 0, 0, 0)


@compiled
def test_weights_at_odd_addresses() -> None:
    weight = np.random.default_rng(0).standard_normal((20, 64), np.float32)
    moved = np.frombuffer(b"x" + weight.tobytes(), np.float32, offset=1).reshape(weight.shape)
    assert np.array_equal(rounded(moved).packed, rounded(weight).packed)
    moved = np.frombuffer(b"x" + weight.T.tobytes(), np.float32, offset=1).reshape(weight.T.shape)
    assert np.array_equal(rounded(moved.T).packed, rounded(weight).packed)


def test_threads_change_nothing(tiny: Path, tiny_onnx: Path, quantize, monkeypatch: pytest.MonkeyPatch) -> None:
    for source, form in ((tiny, "pytorch"), (tiny_onnx, "onnx")):
        contents = []
        for threads, piece in ((2, 1 << 9), (1, 1 << 20)):  # and torch has one thread again
            for module in ("checkpoints.compressed", "graphs.folder"):
                monkeypatch.setattr(f"slipway_quantize.{module}.PIECE_WEIGHTS", piece)
            folder, _ = quantize(source, threads=threads, format=form, level="int4", check=False)
            contents.append({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
        assert contents[0] == contents[1]
