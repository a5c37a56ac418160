"""An engine is reused for the same graph, library and GPU; and times that TensorRT measured are kept by GPU and version.

TensorRT itself needs a GPU, so its builder's configuration is a stand-in here that accepts what it wrote itself.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts import LocalStore
from slipway.artifacts.store import action_key
from slipway.execution.runner import TaskRunner
from slipway.machine.processors import Gpu
from slipway.stage import Context
from slipway.stage_call import StageCall
from slipway_tensorrt_build.builders import Choice
from slipway_tensorrt_build.kept import Timings
from slipway_tensorrt_build.params import TensorRTBuildParams
from slipway_tensorrt_build.stage import STAGE

ADA, HOPPER = Gpu("NVIDIA L4", "sm89"), Gpu("NVIDIA H100 80GB HBM3", "sm90")


class Cache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return self.data


class Config:
    """Takes an empty cache and those of its own device; a build adds to it."""

    def __init__(self, device: bytes) -> None:
        self.device, self.cache = device, Cache(b"")

    def create_timing_cache(self, data: bytes) -> Cache:
        return Cache(data)

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        fits = not cache.data or cache.data.startswith(self.device)
        if fits:
            self.cache = Cache(cache.data)
        return fits

    def get_timing_cache(self) -> Cache:
        return self.cache

    def build(self) -> None:
        self.cache = Cache((self.cache.data or self.device) + b"+")


def built(kept: Path | None, gpu: Gpu, *, version: str = "11.0", library: Any = "tensorrt", device: bytes = b"") -> Any:
    """Build once as the stage does; return whether times were reused, and what was given."""
    ctx = Context(workdir=Path("unused"), kept=kept)
    timings, config = (
        Timings(Choice(library, version, (gpu.architecture,)), gpu, ctx),
        Config(device or gpu.name.encode()),
    )
    timings.give(config)
    given = config.cache.data
    config.build()
    timings.keep(config)
    return timings.reused, given


def test_times_are_kept_by_gpu_and_version(tmp_path: Path) -> None:
    assert built(tmp_path, ADA) == (False, b"")
    assert built(tmp_path, ADA) == (True, b"NVIDIA L4+")
    assert built(tmp_path, ADA) == (True, b"NVIDIA L4++")
    assert built(tmp_path, HOPPER) == (False, b"")
    assert built(tmp_path, ADA, version="11.1") == (False, b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "NVIDIA_H100_80GB_HBM3_sm90_11.0.timings", "NVIDIA_L4_sm89_11.0.timings", "NVIDIA_L4_sm89_11.1.timings",
    ]  # fmt: skip


def test_times_that_tensorrt_refuses_are_measured_again(tmp_path: Path) -> None:
    built(tmp_path, ADA)
    assert built(tmp_path, ADA, device=b"another driver") == (False, b"")
    assert built(tmp_path, ADA, device=b"another driver") == (True, b"another driver+")


@pytest.mark.parametrize("bad", ["link", "folder"])
def test_something_else_in_its_place_is_not_read(tmp_path: Path, bad: str) -> None:
    place = tmp_path / "NVIDIA_L4_sm89_11.0.timings"
    if bad == "link":
        (tmp_path / "secret").write_bytes(b"NVIDIA L4 secret")
        place.symlink_to(tmp_path / "secret")
    else:
        place.mkdir()
    assert built(tmp_path, ADA) == (False, b"")
    assert not (tmp_path / "secret").exists() or (tmp_path / "secret").read_bytes() == b"NVIDIA L4 secret"


def test_nothing_is_kept_without_a_folder_or_of_tensorrt_rtx(tmp_path: Path) -> None:
    assert built(None, ADA) == built(tmp_path, ADA, library="tensorrt_rtx") == (False, b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_same_engine_is_built_once(decoder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    store = LocalStore(tmp_path / "store")
    inputs = {"onnx": store.put(decoder)}
    runner = TaskRunner(store, tmp_path / "scratch")

    def run() -> bool:
        result = asyncio.run(runner.run(StageCall("tensorrt_build", {"targets": ["sm89"]}, inputs)))
        assert result.failure is None
        return result.reused

    assert [run(), run()] == [False, True]


def test_graph_gpu_versions_and_targets_are_the_key_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(graph: str = "a", target: str = "sm89", gpu: str = "sm89") -> str:
        inputs = {"onnx": f"sha256:{graph * 64}"}
        return action_key(STAGE, inputs, TensorRTBuildParams(targets=(target,)), gpu_architecture=gpu)

    keys = [key(), key(graph="b"), key(target="sm120"), key(gpu="sm90")]
    assert len(set(keys)) == 4
    assert key() == keys[0]
    assert set(STAGE.library_versions()) == {"tensorrt", "tensorrt-rtx"}
    # Another version cannot be installed beside this one.
    monkeypatch.setattr("slipway.stage.installed_version", lambda name: f"{name} 99")
    assert key() != keys[0]
