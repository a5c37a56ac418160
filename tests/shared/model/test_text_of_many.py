"""Models that take images too are decoders of text: transformers loads each whole, and runs it on text alone as any decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipway.model import families
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, auto_model
from support.models.text_of_many import TYPES, make_model

NOT_BUILT = {
    "gemma4_unified": "its text part is Gemma 4's",
}
CLOSE, OF_DEEP = 1e-5, {"gemma3n": 2e-3}
"""Differences of logits, and those of models whose layers are many and sparse."""
TOKENS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))


def run(model: Any, tokens: torch.Tensor, *, mask: torch.Tensor | None = None, past: Any = None) -> Any:
    """Return the results for some tokens, as the comparison of outputs asks for them."""
    mask = torch.ones_like(tokens) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    with torch.no_grad():
        return model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True
        )


def test_every_type_of_the_table_is_run_here_or_named() -> None:
    assert set(families._TEXT_OF_MANY_TYPES) == {*TYPES, *NOT_BUILT}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_is_loaded_whole_and_reads_text_as_a_decoder(tmp_path: Any, model_type: str) -> None:
    made = make_model(model_type)
    made.save_pretrained(tmp_path)
    config = ModelConfig.read(tmp_path)
    assert config["model_type"] == model_type
    assert config.family is DECODER
    model, loading = auto_model(DECODER, config).from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is type(made)
    assert not any(loading.values())
    whole = run(model.eval(), TOKENS).logits
    assert torch.equal(whole, run(made, TOKENS).logits)
    first = run(model, TOKENS[:, :18])
    then = run(model, TOKENS[:, 18:], mask=torch.ones_like(TOKENS), past=first.past_key_values)
    close = OF_DEEP.get(model_type, CLOSE)
    assert torch.allclose(then.logits, whole[:, 18:], atol=close)
    assert torch.allclose(first.logits, whole[:, :18], atol=close)  # no token sees a later one
    padded = torch.ones_like(TOKENS)
    padded[1, :4] = 0
    alone = run(model, TOKENS[1:, 4:]).logits
    assert torch.allclose(run(model, TOKENS, mask=padded).logits[1:, 4:], alone, atol=close)
