"""The arithmetic on numbers that are hard to round, weights computed whole, digests, and what a merge does not import."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway.errors import ModelMergeError
from slipway.model.safetensors_file import read_safetensors
from slipway.stage import Context
from slipway_merge.merge import memory_limit
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE
from slipway_merge.tensors.deltas import Change, round_block
from slipway_merge.tensors.kernel import Block, convert
from slipway_merge.tensors.outputs import Computed, Value, plan_layout
from slipway_merge.tensors.tensor_io import FLOAT_TYPES, TensorReader, is_finite
from slipway_merge.writing.writer import MergeWriter, relative_changes

TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PLAIN = """
import json, sys
from pathlib import Path
from slipway.stage import Context
from slipway_merge.stage import STAGE, MergeParams
folder = Path(sys.argv[1])
STAGE.run({"base": folder / "base", "adapter": folder / "adapter"}, MergeParams(verify="spot"), Context(workdir=Path(sys.argv[2])))
print(json.dumps(sorted({"torch", "transformers", "peft"} & sys.modules.keys())))
"""


@pytest.mark.parametrize("output", ["BF16", "F16"])
def test_rounding_of_every_kind_of_number(output):
    """Subnormals, ties, both zeros and neighbours of the largest number, as torch rounds them."""
    bits = np.random.default_rng(5).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    bits[: 1 << 14] &= np.uint32(0xFFFF8000)  # ties
    values = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(values.copy()).to(TORCH[output])
    values = values[torch.isfinite(expected).numpy()].reshape(1, -1)
    expected = expected[torch.isfinite(expected)]
    rounded = round_block(values, source="F32", output=output, block=Block(), change=Change("", "w"), add=None)
    assert np.array_equal(rounded.reshape(-1).view(np.uint16), expected.view(torch.uint16).numpy())


@pytest.mark.parametrize("output", ["BF16", "F16"])
def test_doubles_are_rounded_once(output):
    """Every 16-bit number, half-way to the next one, and beside that by less than float32 can tell."""
    stored = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = stored.view(FLOAT_TYPES[output]).astype(np.float64)
        numbers = np.sort(numbers[np.isfinite(numbers)])
        ties = (numbers[1:] + numbers[:-1]) / 2
        apart = 2.0**-40
        values = np.concatenate([numbers, ties, ties * (1 + apart), ties * (1 - apart)]).reshape(1, -1)
        rounded = round_block(values, source="F64", output=output, block=Block(), change=Change("", "w"), add=None)
    found = rounded.astype(np.float64).reshape(-1)
    down, up = numbers[:-1], numbers[1:]
    assert np.array_equal(found[: len(numbers)], numbers)
    even = np.where(down.astype(FLOAT_TYPES[output]).view(np.uint16) % 2 == 0, down, up)
    tied, far, near = np.split(found[len(numbers) :], 3)
    assert np.array_equal(tied, even)
    assert np.array_equal(far, np.where(ties > 0, up, down))
    assert np.array_equal(near, np.where(ties > 0, down, up))


def test_every_half_becomes_the_float_that_it_is():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    wide = np.empty(halves.shape, np.float32)
    convert(halves, wide, Block())
    assert np.array_equal(wide.view(np.uint32), halves.astype(np.float32).view(np.uint32))
    back = np.empty_like(halves)
    convert(wide, back, Block())
    assert np.array_equal(back.view(np.uint16), wide.astype(np.float16).view(np.uint16))


def test_floats_are_rounded_to_halves_as_numpy_does():
    """Around every half, half-way to the next one and the floats beside that; and floats of every kind at random."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    near = [halves + np.uint32(offset) for offset in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF)]
    anything = np.random.default_rng(9).integers(0, 1 << 32, 1 << 22, dtype=np.uint32)
    usual = np.random.default_rng(9).standard_normal(1 << 20, np.float32) * 0.02
    values = np.concatenate([*near, anything, usual.view(np.uint32)]).view(np.float32).reshape(1, -1)
    rounded = np.empty(values.shape, np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        convert(values, rounded, Block())
        expected = values.astype(np.float16)
    assert np.array_equal(rounded.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("dtype", list(FLOAT_TYPES))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_seen(dtype, bad):
    values = np.full(1000, -1.5, FLOAT_TYPES[dtype])
    assert is_finite(values, dtype)
    values[777] = bad
    assert not is_finite(values, dtype)
    assert is_finite(values[:0], dtype)


def test_zeros_of_either_sign_are_the_same():
    change = Change("m", "w")
    base = np.array([[-0.0, 1.0, -2.0]], np.float32)
    round_block(
        base, source="F32", output="F32", block=Block(), change=change, add=lambda wide, spare: np.add(wide, 0.0, spare)
    )
    assert (change.changed, change.total) == (0, 3)


def test_a_change_of_a_weight_of_zeros_has_no_ratio():
    """A merge without files measures some rows, and those of the base may all be zero."""
    of_zeros, usual = Change("a", "a.weight", change_sum=2.0), Change("b", "b.weight", change_sum=1.0, weight_sum=4.0)
    assert [each["relative_change"] for each in relative_changes([of_zeros, usual])] == [None, 0.5]


def write_computed(folder: Path, new: np.ndarray, *, dtype: str | None, memory: int = 1 << 30) -> MergeWriter:
    torch.manual_seed(1)
    save_file({"w": torch.randn(30, 4, 3, dtype=torch.bfloat16)}, folder / "base.safetensors")
    source = read_safetensors(folder / "base.safetensors").tensors["w"]
    asked = []

    def compute(wide):
        asked.append(wide)
        return new.astype(wide)

    layout = plan_layout(
        {"w": Value(source, computed=Computed("m", "loha", compute))}, dtype=dtype, max_shard_bytes=1 << 20
    )
    with TensorReader() as reader:
        writer = MergeWriter(folder, reader, Context(workdir=folder), max_memory_bytes=memory)
        writer.write(layout)
    assert asked == [np.float64 if dtype == "F32" else np.float32]
    return writer


@pytest.mark.parametrize("dtype", [None, "F32", "F16"])
def test_weight_computed_whole(tmp_path, dtype):
    new = np.random.default_rng(2).standard_normal((30, 4, 3))
    writer = write_computed(tmp_path, new, dtype=dtype, memory=1)
    merged = load_file(tmp_path / "model.safetensors")["w"]
    assert torch.equal(merged, torch.from_numpy(new).float().to(TORCH[dtype or "BF16"]))
    base = load_file(tmp_path / "base.safetensors")["w"].double()
    [change] = writer.written.changes
    expected = (torch.from_numpy(new) - base).norm() / base.norm()
    assert change.relative_change == pytest.approx(expected.item(), rel=1e-5)
    assert (change.form, change.rank, change.total) == ("loha", None, 360)
    assert change.unchanged_share < 0.1


def test_computed_weight_of_another_shape(tmp_path):
    with pytest.raises(ModelMergeError, match=r"loha gave values of shape \(30, 12\)"):
        write_computed(tmp_path, np.zeros((30, 12)), dtype=None)


def test_digests_are_told(make_case):
    case = make_case("llama", target_modules=["q_proj"])
    ctx = Context(workdir=case.workdir, threads=2)
    out = STAGE.run({"base": case.base, "adapter": case.adapter}, MergeParams(max_shard_bytes=30_000), ctx)["pytorch"]
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 2
    assert ctx.digests == {path: f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in shards}


def test_plain_merge_imports_numpy_alone(make_case):
    case = make_case("llama", torch.bfloat16, target_modules=["q_proj", "up_proj"])
    command = [sys.executable, "-c", PLAIN, str(case.base.parent), str(case.workdir)]
    assert (case.base.name, case.adapter.name) == ("base", "adapter")
    assert json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) == []


def test_memory_to_work_in():
    assert memory_limit(7, allowed=100) == 7
    assert memory_limit(700, allowed=100) == 100
    assert 0 < memory_limit(None, allowed=1 << 60) < 1 << 60
