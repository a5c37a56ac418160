"""Biases of attention by position are those of transformers, in forms that engines write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.models.onnx_models import Exported
from support.models.table_models import Row, make_row

FALCON = Row(
    "Falcon, ALiBi", "FalconForCausalLM",
    {
        "vocab_size": 64, "pad_token_id": 1, "eos_token_id": 2, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "alibi": True, "multi_query": False, "new_decoder_architecture": False,
    },
)  # fmt: skip


@pytest.mark.parametrize("heads", [4, 6, 71])
def test_falcons_bias_has_the_same_bits_in_float32(heads: int) -> None:
    import torch
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    from slipway_onnx_export.loading.weightless import _compute_rounded_bias

    mask = torch.ones(2, 3000, dtype=torch.int64)
    mask[0, :7] = 0
    slopes = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)[:, 0, 1]
    wanted = build_alibi_tensor(mask, heads, torch.float32)
    assert torch.equal(_compute_rounded_bias(slopes, mask, heads, torch.float32), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("params", [{"engine": "dynamo"}, {"engine": "legacy", "opset": 14}], ids=["dynamo", "legacy"])
def test_a_decoder_with_such_a_bias(tmp_path: Path, export: Callable[..., Exported], params: dict[str, Any]) -> None:
    """The comparison has batches with left padding and several tokens after a past; its reference is another, untouched model."""
    from transformers.models.falcon import modeling_falcon

    before = modeling_falcon.build_alibi_tensor
    exported = export(make_row(FALCON, tmp_path / "model"), **params)
    assert exported.facts["parity_max_abs_diff"] < 1e-4
    assert modeling_falcon.build_alibi_tensor is before
