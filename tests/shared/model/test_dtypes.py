"""The table of data types against the libraries it speaks of."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file

from slipway.model.dtypes import DTYPES, numpy_dtypes, torch_dtypes

IN_TORCH = [name for name, row in DTYPES.items() if row.torch]


@pytest.mark.parametrize("name", IN_TORCH)
def test_every_library_has_the_type_under_its_name_and_in_its_size(name: str) -> None:
    row = DTYPES[name]
    assert torch_dtypes(name)[name].itemsize * 8 == row.bits
    assert numpy_dtypes(name)[name].itemsize * 8 == row.bits
    assert ir.DataType[row.onnx].numpy() == numpy_dtypes(name)[name]


@pytest.mark.parametrize("name", [name for name in IN_TORCH if name not in {"F8_E4M3FNUZ", "F8_E5M2FNUZ"}])
def test_safetensors_writes_the_type_under_its_name(name: str, tmp_path: Path) -> None:
    save_file({"t": torch.zeros(8, dtype=torch_dtypes(name)[name])}, tmp_path / "t.safetensors")
    data = (tmp_path / "t.safetensors").read_bytes()
    entry = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["t"]
    assert entry["dtype"] == name
    assert (entry["data_offsets"][1] - entry["data_offsets"][0]) * 8 == 8 * DTYPES[name].bits
