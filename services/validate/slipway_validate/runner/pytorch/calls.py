"""Call a transformers model for each kind of comparison, and return the results to compare.

Axes as in :mod:`slipway_validate.runner.model`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from slipway.model.families import Comparison
from slipway_validate.runner.model import Past, Step

Call = Callable[[Any, Step], tuple[torch.Tensor, Past]]
"""Function from the module and one step to the results and the cache for the next step."""


def _next_tokens(module: Any, step: Step, *, positions: bool) -> tuple[torch.Tensor, Past]:
    inputs = _text(step)
    if positions:
        inputs["position_ids"] = _tensor(step.position_ids)
    output = module(**inputs, past_key_values=step.past, use_cache=True)
    return output.logits, output.past_key_values


def _teacher_forced(module: Any, step: Step) -> tuple[torch.Tensor, Past]:
    """Run the encoder in the first step, by itself as generating does; later steps reuse its output."""
    source = step.source
    assert source is not None
    masked = {} if source.mask is None else {"attention_mask": _tensor(source.mask)}
    if step.past is None:
        values = _tensor(source.values)
        values = values.to(module.dtype) if values.is_floating_point() else values
        encoded, cache = module.get_encoder()(**{module.main_input_name: values}, **masked, return_dict=True), None
    else:
        encoded, cache = step.past
    inputs = {"encoder_outputs": encoded, "decoder_input_ids": _tensor(step.input_ids), **masked}
    output = module(**inputs, past_key_values=cache, use_cache=True)
    return output.logits, (encoded, output.past_key_values)


def _classes(module: Any, step: Step) -> tuple[torch.Tensor, Past]:
    """Return classes (B, 1, C) of a whole text or (B, S, C) of its tokens; for several labels at once (B, C, 2), yes and no."""
    logits = module(**_text(step)).logits
    if module.config.problem_type == "multi_label_classification":
        logits = logits.flatten(1)
        return torch.stack([logits, torch.zeros_like(logits)], dim=-1), None
    return logits if logits.ndim == 3 else logits[:, None], None


def _spans(module: Any, step: Step) -> tuple[torch.Tensor, Past]:
    """Return the logits of the answer's start and end: (B, 2, S)."""
    output = module(**_text(step))
    return torch.stack([output.start_logits, output.end_logits], dim=1), None


def _masked_tokens(module: Any, step: Step) -> tuple[torch.Tensor, Past]:
    return module(**_text(step)).logits, None


def _embeddings(module: Any, step: Step) -> tuple[torch.Tensor, Past]:
    return module(**_text(step)).last_hidden_state, None


_CALLS: Mapping[Comparison, Call] = {
    Comparison.TEACHER_FORCED: _teacher_forced,
    Comparison.CLASSES: _classes,
    Comparison.SPANS: _spans,
    Comparison.MASKED_TOKENS: _masked_tokens,
    Comparison.EMBEDDINGS: _embeddings,
}


def choose_call(comparison: Comparison, module: Any) -> Call:
    """Choose the call for a kind of comparison; a decoder gets positions if its forward accepts them."""
    if comparison is Comparison.NEXT_TOKEN:
        return partial(_next_tokens, positions="position_ids" in inspect.signature(module.forward).parameters)
    return _CALLS[comparison]


def _text(step: Step) -> dict[str, torch.Tensor]:
    return {"input_ids": _tensor(step.input_ids), "attention_mask": _tensor(step.attention_mask)}


def _tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
