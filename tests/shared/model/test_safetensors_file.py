"""Headers are believed only when everything in them agrees with everything else and with the file's size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.errors import CheckpointValidationError
from slipway.model.safetensors_file import read_safetensors, read_weights


def pack(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2, 3), start: int = 0, end: int = 24) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


GOOD = pack({"__metadata__": {"format": "pt"}, "b": entry("BF16", (4,), 24, 32), "a": entry()}, bytes(32))


def test_a_good_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    file = read_safetensors(path)
    assert list(file.tensors) == ["a", "b"], "in the order of their bytes"
    assert file.metadata == {"format": "pt"}
    info = file.tensors["b"]
    assert (info.dtype, info.shape, info.nbytes, info.numel) == ("BF16", (4,), 8, 4)
    assert info.end == path.stat().st_size


def test_a_file_written_by_the_library(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tensors = {"w": torch.arange(6.0).reshape(2, 3), "e": torch.zeros(0, 4), "s": torch.tensor(2, dtype=torch.int64)}
    save_file(tensors, tmp_path / "x.safetensors")
    found = read_safetensors(tmp_path / "x.safetensors").tensors
    assert {name: info.shape for name, info in found.items()} == {"w": (2, 3), "e": (0, 4), "s": ()}
    raw = (tmp_path / "x.safetensors").read_bytes()[found["w"].start : found["w"].end]
    assert raw == tensors["w"].numpy().tobytes()


BAD = {
    "empty file": (b"", "truncated"),
    "half a length": (b"\x10\x00", "truncated"),
    "header cut": (GOOD[:40], "truncated"),
    "data cut": (GOOD[:-1], "'b' ends at byte"),
    "data after the end": (GOOD + b"x", "1 bytes follow"),
    "huge header": (pack(b"{}", length=1 << 60), "truncated"),
    "not JSON": (pack(b"{nope}"), "not JSON"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "not JSON"),
    "a list": (pack([1]), "not an object"),
    "tensor twice": (pack(b'{"a": {}, "a": {}}'), "names 'a' twice"),
    "entry is no object": (pack({"a": 3}), "'a' is not"),
    "unknown type": (pack({"a": entry("F33")}, bytes(24)), "'F33'"),
    "type is a list": (pack({"a": {**entry(), "dtype": []}}, bytes(24)), "data type"),
    "negative shape": (pack({"a": entry(shape=(-2, -3))}, bytes(24)), "impossible shape"),
    "boolean shape": (pack({"a": {**entry(), "shape": [True, 6]}}, bytes(24)), "impossible shape"),
    "offsets backwards": (pack({"a": entry(start=24, end=0)}, bytes(24)), "hold"),
    "size and shape differ": (pack({"a": entry(shape=(2, 4))}, bytes(24)), "takes 32 bytes"),
    "gap": (pack({"a": entry(start=8, end=32)}, bytes(32)), "gap"),
    "overlap": (pack({"a": entry(), "b": entry(start=12, end=36)}, bytes(36)), "overlaps"),
    "metadata of numbers": (pack({"__metadata__": {"step": 3}}), "__metadata__"),
    "deeply nested": (pack(b"[" * 200_000), "not JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_damage_is_named(tmp_path, case):
    path = tmp_path / "x.safetensors"
    path.write_bytes(BAD[case][0])
    with pytest.raises(CheckpointValidationError) as caught:
        read_safetensors(path)
    assert caught.value.reason == "SAFETENSORS_CORRUPT"
    assert str(path) in str(caught.value)
    assert BAD[case][1] in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
def test_no_flipped_byte_crashes_the_reader(tmp_path_factory, position, value):
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.write_bytes(GOOD[:position] + bytes([value]) + GOOD[position + 1 :])
    try:
        file = read_safetensors(path)
    except CheckpointValidationError as error:
        assert error.reason == "SAFETENSORS_CORRUPT"
    else:
        assert sum(info.nbytes for info in file.tensors.values()) == 32


def test_a_missing_file(tmp_path):
    with pytest.raises(CheckpointValidationError) as caught:
        read_safetensors(tmp_path / "none.safetensors")
    assert caught.value.reason == "FILE_ERROR"


def sharded(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model-00001-of-00002.safetensors").write_bytes(pack({"a": entry()}, bytes(24)))
    (folder / "model-00002-of-00002.safetensors").write_bytes(pack({"b": entry()}, bytes(24)))
    write_index(folder, a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors")
    return folder


def write_index(folder: Path, **weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards(tmp_path):
    folder = sharded(tmp_path / "model")
    weights = read_weights(folder)
    assert list(weights) == ["a", "b"]
    assert [tensor.file.name for tensor in weights.values()] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_a_single_file_comes_before_an_index(tmp_path):
    folder = sharded(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(GOOD)
    assert read_weights(folder)["a"].file.name == "model.safetensors"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "model-00002-of-00002.safetensors (1 tensor)"),
        (lambda f: (f / "model.safetensors.index.json").unlink(), "neither"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "not readable JSON"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "no weight_map"),
        (write_index, "no weight_map"),
        (lambda f: write_index(f, a=3), "no weight_map"),
        (lambda f: write_index(f, a="../model-00001-of-00002.safetensors"), "not a file beside it"),
        (lambda f: write_index(f, c="model-00001-of-00002.safetensors"), "'c'"),
        (lambda f: write_index(f, a="model-00002-of-00002.safetensors", b="model-00001-of-00002.safetensors"), "'a'"),
    ],
)
def test_incomplete_models_are_named(tmp_path, change, words):
    folder = sharded(tmp_path / "model")
    change(folder)
    with pytest.raises(CheckpointValidationError) as caught:
        read_weights(folder)
    assert caught.value.reason == "BASE_MODEL_INVALID"
    assert words in str(caught.value)


def test_a_tensor_in_two_shards(tmp_path):
    folder = sharded(tmp_path / "model")
    (folder / "model-00002-of-00002.safetensors").write_bytes(
        pack({"b": entry(), "a": entry(start=24, end=48)}, bytes(48))
    )
    with pytest.raises(CheckpointValidationError) as caught:
        read_weights(folder)
    assert caught.value.reason == "SAFETENSORS_CORRUPT"
    assert "'a'" in str(caught.value)
