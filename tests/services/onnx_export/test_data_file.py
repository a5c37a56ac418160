"""The data file: every layout and type of a weight, in pieces, by one thread and by two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipway.errors import ONNXExportError
from slipway_onnx_export.loading.conversion import Stack, Weight
from slipway_onnx_export.writing import weights as data_file
from slipway_onnx_export.writing.weights import PAGE, SMALL, DataFile


def weights() -> dict[str, Weight]:
    random = torch.Generator().manual_seed(0)
    found: dict[str, Weight] = {"scalar": torch.tensor(3.0), "empty": torch.empty(4, 0)}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        matrix = torch.randn(70, 130, generator=random).to(dtype)
        found |= {
            f"{dtype} rows": matrix,
            f"{dtype} transposed": matrix.t(),
            f"{dtype} column": matrix[:, 3],
            f"{dtype} every second": matrix[::2, ::3],
            f"{dtype} swapped": matrix.reshape(7, 10, 130).permute(0, 2, 1),
        }
    experts = tuple((torch.randn(5, 8, generator=random), torch.randn(3, 8, generator=random)) for _ in range(4))
    return found | {"stack": Stack(experts), "swapped stack": Stack(experts, swapped=True)}


def write(path: Path, tensors: dict[str, Weight], *, threads: int) -> dict[str, tuple[int, int]]:
    with DataFile(path, threads=threads) as file:
        places = {name: file.write_tensor(weight, name=name) for name, weight in tensors.items()}
        return places | {"bytes": file.write_bytes(b"constant")}


@pytest.mark.parametrize(("threads", "piece"), [(1, 1 << 20), (2, 4000), (2, 1)])
def test_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, piece: int) -> None:
    monkeypatch.setattr(data_file, "PIECE_BYTES", piece)
    before = torch.get_num_threads()
    places = write(tmp_path / "data", weights(), threads=threads)
    assert torch.get_num_threads() == before
    data = (tmp_path / "data").read_bytes()
    for name, weight in weights().items():
        offset, length = places[name]
        whole = weight[:] if isinstance(weight, Stack) else weight
        assert offset % (PAGE if length >= PAGE else SMALL) == 0
        assert data[offset : offset + length] == whole.float().contiguous().numpy().tobytes(), name
    offset, length = places["bytes"]
    assert data[offset:] == b"constant"
    assert len(data) == offset + length


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_the_first_weight_that_is_not_finite_is_named(tmp_path: Path, bad: float) -> None:
    matrix = torch.ones(300, 8, dtype=torch.bfloat16)
    spoiled = matrix.clone()
    spoiled[299, 7] = bad
    with pytest.raises(ONNXExportError, match="'second' contains NaN or infinity") as caught:
        write(tmp_path / "data", {"first": matrix, "second": spoiled.t(), "third": spoiled}, threads=2)
    assert caught.value.reason == "NON_FINITE_WEIGHTS"
    assert caught.value.about["tensor"] == "second"
