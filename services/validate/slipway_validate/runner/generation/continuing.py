"""Continue prompts greedily, all of them in one batch: they are equally long, so that no row needs padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slipway_validate.numerics import Logits
from slipway_validate.runner.model import LanguageModel, Past, Step, source_of
from slipway_validate.samples import Samples

Prompt = tuple[int, ...]


def continue_greedily(
    model: LanguageModel,
    samples: Samples,
    prompts: Sequence[Prompt],
    new_tokens: int,
    *,
    check: Callable[[Logits, str], None],
) -> tuple[Prompt, ...]:
    """Return the continuation of each prompt, through the KV cache if the model has one.

    Args:
        model: The model.
        samples: The samples; prompt ``n`` belongs to window ``n``.
        prompts: Prompts of one length.
        new_tokens: Tokens to continue each with.
        check: Called with all results and a description of their place.
    """
    size = min(len(prompts), model.bounds.batch)
    found: list[Prompt] = []
    for start in range(0, len(prompts), size or 1):
        rows = list(range(start, min(start + size, len(prompts))))
        found += _continue_batch(model, samples, rows, prompts, new_tokens, check=check)
    return tuple(found)


def _continue_batch(
    model: LanguageModel,
    samples: Samples,
    rows: list[int],
    prompts: Sequence[Prompt],
    new_tokens: int,
    *,
    check: Callable[[Logits, str], None],
) -> list[Prompt]:
    tokens = np.array([prompts[row] for row in rows], dtype=np.int64)  # (B, so far)
    begin, source, past = tokens.shape[1], source_of(samples, rows), None
    fresh: Past = tokens
    while tokens.shape[1] < begin + new_tokens:
        total = tokens.shape[1]
        positions = np.arange(total - fresh.shape[1], total, dtype=np.int64)
        step = Step(
            input_ids=fresh,
            attention_mask=np.ones_like(tokens),
            position_ids=np.broadcast_to(positions, fresh.shape),
            past=past,
            source=source,
            last_only=True,
        )
        logits, cache = model.forward(step)
        check(logits, f"greedy continuation, token {total}")
        chosen = logits[:, -1].argmax(axis=-1)[:, None]
        tokens = np.concatenate([tokens, chosen], axis=1)
        fresh, past = (chosen, cache) if model.has_cache else (tokens, None)
    return [tuple(int(token) for token in row[begin:]) for row in tokens]
