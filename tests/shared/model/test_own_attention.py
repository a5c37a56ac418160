"""Attention of a format's own, called as transformers calls its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from slipway.model.pytorch.traced_forms import use_attention, use_transformers_attention


def plain(
    query: Any, key: Any, value: Any, attention_mask: Any, *, scaling: float | None, softcap: float | None
) -> Any:
    assert softcap is None
    share = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(share, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    return (torch.softmax(scores + attention_mask, dim=-1) @ value).transpose(1, 2)


def zero(query: Any, *_: Any, **__: Any) -> Any:
    return torch.zeros_like(query).transpose(1, 2)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64)).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(9)[None], use_cache=False).logits


def test_a_model_computes_with_it_and_with_its_own_again(model: Any) -> None:
    wanted = logits(model)
    use_attention(model, "slipway_test_plain", plain)
    torch.testing.assert_close(logits(model), wanted)
    use_attention(model, "slipway_test_zero", zero)
    assert (logits(model) - wanted).abs().max() > 1e-3
    use_transformers_attention(model)
    torch.testing.assert_close(logits(model), wanted)


def test_what_it_would_not_compute_is_named(model: Any) -> None:
    layer, states = model.model.layers[0].self_attn, torch.zeros(1, 3, 32)
    positions = model.model.rotary_emb(states, torch.arange(3)[None])
    use_attention(model, "slipway_test_odd", zero, unread=("unread",))
    layer(states, position_embeddings=positions, attention_mask=None, unread=1)
    with pytest.raises(ValueError, match="its attention takes sinks"):
        layer(states, position_embeddings=positions, attention_mask=None, sinks=torch.zeros(4))
