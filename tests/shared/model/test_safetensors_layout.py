"""What is planned is what the files have, for our own reader and for the library's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from slipway.model.dtypes import DTYPES
from slipway.model.safetensors_file import read_weights
from slipway.model.safetensors_layout import PlannedFile, TensorSpec, index_file, plan_files

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(["F64", "F32", "BF16", "U8", "BOOL", "F8_E4M3"])
groups_of_tensors = st.lists(
    st.lists(st.tuples(st.text(min_size=1, max_size=6), dtypes, shapes), min_size=1, max_size=3),
    max_size=8,
)


def write(folder: Path, files: list[PlannedFile]) -> None:
    for file in files:
        (folder / file.filename).write_bytes(file.header + bytes(file.nbytes - len(file.header)))
    weight_map = {tensor.name: file.filename for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    if index := index_file(weight_map, total_bytes=total):
        (folder / index[0]).write_text(index[1], encoding="utf-8")


@settings(max_examples=80, deadline=None)
@given(groups=groups_of_tensors, limit=st.integers(1, 200))
def test_files_are_as_planned(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[tuple[str, str, tuple[int, ...]]]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("model")
    specs = [
        [TensorSpec(f"{group}.{member}.{name}", dtype, shape) for member, (name, dtype, shape) in enumerate(tensors)]
        for group, tensors in enumerate(groups)
    ]
    files = plan_files(specs, max_shard_bytes=limit)
    write(folder, files)
    found = read_weights(folder)
    planned = {tensor.name: tensor for file in files for tensor in file.tensors}
    assert {n: (t.dtype, t.shape, t.start, t.end) for n, t in found.items()} == {
        n: (t.dtype, t.shape, t.start, t.end) for n, t in planned.items()
    }
    assert {n: t.file.name for n, t in found.items()} == {n: str(t.file) for n, t in planned.items()}
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {t.name: (t.dtype, t.shape) for g in specs for t in g}
    for file in files:
        with safe_open(folder / file.filename, framework="np") as opened:
            assert sorted(opened.keys()) == sorted(tensor.name for tensor in file.tensors)
        assert all(tensor.start * 8 % DTYPES[tensor.dtype].bits == 0 for tensor in file.tensors)
    for group in specs:
        size = sum(tensor.nbytes for tensor in group)
        (home,) = {planned[tensor.name].file for tensor in group}
        shard = sum(tensor.nbytes for tensor in planned.values() if tensor.file == home)
        assert shard <= limit or shard == size or size == 0


def test_a_single_file_has_no_index_and_shards_are_numbered() -> None:
    tensors = [[TensorSpec(name, "F32", (4,))] for name in "abc"]
    assert [file.filename for file in plan_files(tensors, max_shard_bytes=48)] == ["model.safetensors"]
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    files = plan_files(tensors, max_shard_bytes=32)
    assert [(file.filename, [tensor.name for tensor in file.tensors]) for file in files] == [
        (shards[0], ["a", "b"]),
        (shards[1], ["c"]),
    ]
    assert index_file({"a": "one", "b": "one"}, total_bytes=32) is None
    name, text = index_file({"b": shards[1], "a": shards[0]}, total_bytes=48) or ("", "")
    assert name == "model.safetensors.index.json"
    assert json.loads(text) == {"metadata": {"total_size": 48}, "weight_map": {"a": shards[0], "b": shards[1]}}


def test_shards_are_of_about_the_same_size() -> None:
    tensors = [[TensorSpec(f"{number:02}", "U8", (10 + number % 3,))] for number in range(60)]
    files = plan_files(tensors, max_shard_bytes=500)
    sizes = [sum(tensor.nbytes for tensor in file.tensors) for file in files]
    assert len(sizes) == 2
    assert max(sizes) - min(sizes) <= 24, "of 500 and 160 bytes"
    assert [tensor.name for file in files for tensor in file.tensors] == [f"{number:02}" for number in range(60)]
