"""Continue prompts greedily, all of them in one batch: they are equally long, so that no row needs padding.

A draft saves most of the calls. Where a model finds each of its tokens the most likely one after those before it, the draft is what the model
would write: so it is computed as a whole after the prompt, and only a model that chooses another token writes its own text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slipway_validate.numerics import Ints, Logits
from slipway_validate.runner.model import LanguageModel, Past, Step, run_segments, source_of
from slipway_validate.samples import Samples

Prompt = tuple[int, ...]


def continue_greedily(
    model: LanguageModel,
    samples: Samples,
    prompts: Sequence[Prompt],
    new_tokens: int,
    *,
    drafts: Sequence[Prompt] = (),
    check: Callable[[Logits, str], None],
) -> tuple[Prompt, ...]:
    """Return the continuation of each prompt, through the KV cache if the model has one.

    Args:
        model: The model.
        samples: The samples; prompt ``n`` belongs to window ``n``.
        prompts: Prompts of one length.
        new_tokens: Tokens to continue each with.
        drafts: Likely continuations, one per prompt; none if all tokens are computed one by one.
        check: Called with all results and a description of their place.
    """
    size = min(len(prompts), model.bounds.batch)
    found: list[Prompt] = []
    for start in range(0, len(prompts), size or 1):
        rows = list(range(start, min(start + size, len(prompts))))
        likely = [drafts[row] for row in rows] if drafts else []
        if likely and _writes(model, samples, rows, prompts, likely, check=check):
            found += likely
        else:
            found += _continue_batch(model, samples, rows, prompts, new_tokens, check=check)
    return tuple(found)


def _writes(
    model: LanguageModel,
    samples: Samples,
    rows: list[int],
    prompts: Sequence[Prompt],
    drafts: Sequence[Prompt],
    *,
    check: Callable[[Logits, str], None],
) -> bool:
    """Return whether a model would write these drafts itself: in two calls of a decoder through its cache, or in one of other models."""
    text = np.array([prompts[row] for row in rows], dtype=np.int64)  # (B, prompt)
    wanted = np.array(drafts, dtype=np.int64)  # (B, new)
    if not wanted.size:
        return False
    ids = np.concatenate([text, wanted[:, :-1]], axis=1)
    begin, length = text.shape[1], ids.shape[1]
    cached = model.has_cache and samples.source is None and length > begin
    segments = (begin, length - begin) if cached else (length,)
    if max(segments) > model.bounds.sequence or sum(segments[:-1]) > model.bounds.past:
        return False
    chosen: list[Ints] = []
    for columns, logits in run_segments(model, ids, np.ones_like(ids), segments, source=source_of(samples, rows)):
        check(logits, f"greedy continuation, tokens {columns.start} to {columns.stop - 1}")
        chosen.append(logits.argmax(axis=-1))
    return bool((np.concatenate(chosen, axis=1)[:, begin - 1 :] == wanted).all())


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
