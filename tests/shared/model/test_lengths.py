"""The lengths beyond which a model computes otherwise, and rotary embeddings that a trace can compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="no extra with torch is installed")
import torch
import transformers

from slipway.errors import LiteRtExportError
from slipway.model.limits import grows_with_text, length_thresholds, position_thresholds

_FACTORS = {"long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **_FACTORS}
_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "settings", "positions", "lengths"),
    [
        ("Llama", {}, (), ()),
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, (), ()),
        ("Llama", {"rope_parameters": _DYNAMIC}, (32,), (32,)),
        ("Llama", {"rope_parameters": {**_DYNAMIC, "original_max_position_embeddings": 8}}, (8, 32), (8, 32)),
        ("Phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 16, "pad_token_id": 0}, (16,), (16,)),
        ("Mistral", {"sliding_window": 8, "rope_parameters": _DYNAMIC}, (32,), (8, 32)),
        ("Llama4Text", {"attention_chunk_size": 64, "floor_scale": 100}, (), (64, 100)),
        ("Llama4Text", {"attention_chunk_size": 64, "attn_temperature_tuning": False}, (), (64,)),
        ("GPT2", {}, (), ()),
    ],
)  # fmt: skip
def test_the_thresholds_of_a_configuration(
    config: str, settings: dict[str, Any], positions: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    found = getattr(transformers, f"{config}Config")(**{**_SIZES, **settings})
    assert (position_thresholds(found), length_thresholds(found)) == (positions, lengths)
    assert grows_with_text(found) == (settings.get("rope_parameters", {}).get("rope_type") == "dynamic")


def test_the_thresholds_of_layers_of_each_type() -> None:
    kinds = {"full_attention": _DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    found = transformers.Gemma3TextConfig(**_SIZES, sliding_window=8, rope_parameters=kinds, layer_types=[*kinds])
    assert length_thresholds(found) == (8, 32)


def _model(rope: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**_SIZES, rope_parameters=rope, attn_implementation="eager")
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("rope", [_DYNAMIC, _LONG], ids=["dynamic", "longrope"])
@torch.no_grad()
def test_frequencies_in_the_graph_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from slipway.model.pytorch.traced_rotary import compute_frequencies_in_graph

    tokens = torch.arange(70)[None] % 64
    lengths = (5, 16, 17, 32, 33, 34, 70)  # ascending: transformers' code keeps the frequencies of the longest text
    original = _model(rope)
    wanted = [original(tokens[:, :size]).logits for size in lengths]
    model = _model(rope)
    compute_frequencies_in_graph(model)
    for size, right in sorted(zip(lengths, wanted, strict=True), reverse=True):
        torch.testing.assert_close(model(tokens[:, :size]).logits, right, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_long_text_is_forgotten() -> None:
    from slipway.model.pytorch.traced_rotary import forget_longest_text

    model, tokens = _model(_DYNAMIC), torch.arange(70)[None] % 64
    right = model(tokens[:, :40]).logits
    model(tokens)
    assert (model(tokens[:, :40]).logits - right).abs().max() > 1e-4, "transformers has no such memory any more"
    forget_longest_text(model)
    torch.testing.assert_close(model(tokens[:, :40]).logits, right)


@pytest.mark.parametrize(("rope", "positions"), [(_DYNAMIC, 32), (_LONG, 16)], ids=["dynamic", "longrope"])
def test_programs_of_a_fixed_length_end_where_frequencies_change(
    tmp_path: Path, rope: dict[str, Any], positions: int
) -> None:
    from slipway.model.pytorch.text_model import open_text_model

    _model(rope).save_pretrained(tmp_path)
    assert open_text_model(tmp_path, lambda _: "", title="LiteRT", error=LiteRtExportError).positions == positions
