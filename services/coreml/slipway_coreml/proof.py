"""Compare the traced program, which is converted next, with the model and transformers' own attention."""

from __future__ import annotations

from typing import Any

import torch

from slipway.model.families import DECODER
from slipway.model.pytorch.own_attention import use_transformers_attention
from slipway.model.pytorch.text_model import TextModel, has_token_types
from slipway.proof.differences import LIMITS, difference

_LONGEST = 96
_SEED = 5


def check_program(traced: Any, source: TextModel, *, length: int, call_length: int) -> float:
    """Return the largest difference between the program's and the model's results, relative to the largest result.

    A decoder gets texts of several lengths, in calls of several sizes; each text reuses the cache of the one before. Other models get several
    lengths, with and without padding.

    Raises:
        ValueError: The difference is more than float32 arithmetic explains.
    """
    program = traced.module()
    use_transformers_attention(source.model)
    draw = torch.Generator().manual_seed(_SEED)
    size = int(source.model.config.get_text_config().vocab_size)
    with torch.no_grad():
        worst = max(
            _compare_decoder(program, source.model, tokens, call_length)
            if source.family is DECODER
            else _compare_texts(program, source, tokens)
            for tokens in (
                torch.randint(0, size, (1, many), generator=draw)
                for many in dict.fromkeys(min(many, length) for many in (_LONGEST, 7, 1))
            )
        )
    if worst > LIMITS["float32"]:
        raise ValueError(f"the traced program's results are off by {worst:.1e} of the largest one")
    return worst


def _compare_decoder(program: Any, model: Any, tokens: torch.Tensor, most: int) -> float:
    wanted = model(input_ids=tokens, use_cache=False).logits
    parts, place, many = [], 0, most
    while place < tokens.shape[1]:
        ids = tokens[:, place : place + many]
        parts.append(program(ids, torch.arange(place, place + ids.shape[1])))
        place, many = place + ids.shape[1], 1 if many > 1 else max(1, most // 2)
    return _share(torch.cat(parts, dim=1), wanted)


def _compare_texts(program: Any, source: TextModel, tokens: torch.Tensor) -> float:
    mask = torch.ones_like(tokens)
    mask[:, tokens.shape[1] - tokens.shape[1] // 3 :] = 0
    worst = 0.0
    for each in (torch.ones_like(tokens), mask):
        wanted = source.model(input_ids=tokens, attention_mask=each)
        types = (torch.zeros_like(tokens),) if has_token_types(source.model.config) else ()
        results = program(tokens, each, *types)
        for name, value in zip(source.family.outputs, results, strict=False):
            whole = getattr(wanted, name)
            real = each[0].bool()
            by_token = whole.dim() > 1 and whole.shape[1] == tokens.shape[1]
            worst = max(worst, _share(value[:, real], whole[:, real]) if by_token else _share(value, whole))
    return worst


def _share(results: torch.Tensor, wanted: torch.Tensor) -> float:
    return difference(results.numpy(), wanted.numpy()).share
