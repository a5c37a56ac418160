"""The grid of a stored weight is found by what its scales make of codes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from slipway.model.safetensors_file import TensorInfo
from slipway_gguf.diagnosis import _MULTIPLES
from slipway_gguf.runtime.stored import _CODES, _Quantized
from slipway_gguf.weights.ggml import quantize
from slipway_gguf.weights.planned import Part, Planned

pytestmark = pytest.mark.own_process

_PART = Part(TensorInfo("a", "F32", (6, 512), Path("a"), 0, 0))


@pytest.mark.parametrize("kind", _CODES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["as it is", "a norm's"])
def test_values_round_to_the_nearest_of_the_files_own_grid(kind: Kind, offset: float) -> None:
    exact = np.random.default_rng(5).standard_normal((6, 512)).astype(np.float32)
    data = np.frombuffer(quantize(exact, kind), np.uint8).reshape(6, -1)
    tensor: Any = SimpleNamespace(data=data, tensor_type=kind)
    planned = Planned("a", (6, 512), (_PART,), offset)
    rows = _Quantized(tensor, planned, None).take(slice(None))
    same = rows.nearest(rows.values)
    assert torch.allclose(same, rows.values, atol=1e-5)
    wanted = torch.from_numpy(exact) - offset
    nearest = rows.nearest(wanted)
    # ggml's own choice minimizes an error too, but no code is nearer than the nearest.
    assert bool(((nearest - wanted).abs() <= (rows.values - wanted).abs() + 1e-5).all())
    assert rows.grid is not None
    steps = rows.grid().scales
    assert steps is not None
    widest = 1.0 if _CODES[kind].levels is None else float(_CODES[kind].levels.diff().max())
    inside = (nearest - wanted).abs() <= steps.abs() * widest / 2 + 1e-5
    assert float(inside.float().mean()) > 0.9, "the rest lies beyond the largest code"


def test_every_type_of_a_file_made_here_has_a_grid() -> None:
    quantized = {kind for kind in _MULTIPLES if kind is not Kind.F16}
    assert set(_CODES) == quantized


def test_of_other_types_no_grid_is_known() -> None:
    kind = Kind.Q3_K
    exact = np.random.default_rng(5).standard_normal((2, 512)).astype(np.float32)
    tensor: Any = SimpleNamespace(data=np.frombuffer(quantize(exact, kind), np.uint8).reshape(2, -1), tensor_type=kind)
    planned = Planned("a", (2, 512), (_PART,))
    rows = _Quantized(tensor, planned, None).take(slice(None))
    assert torch.equal(rows.nearest(torch.from_numpy(exact)), torch.from_numpy(exact)), "no error is explained"
