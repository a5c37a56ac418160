"""Generate text with a model: greedily, in long continuations, and as answers to the user's test inputs.

Prompts of one length are continued in one batch. A draft saves most of the calls. Where a model finds each of its tokens the most likely
one after those before it, the draft is what the model would write: so it is computed as a whole after the prompt, and only a model that
chooses another token writes its own text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from slipway.model.families import SEQUENCE_CLASSIFIER, Comparison, Family
from slipway.proof.numerics import Ints, LogitComparer, Logits
from slipway.proof.runtime import (
    LanguageModel,
    Past,
    Samples,
    Source,
    Step,
    Values,
    plain_step,
    positions_of,
    run_segments,
    segments_within,
    source_of,
    whole_source,
)
from slipway_validate.protocol.inputs import Answers, EncodedInput, EncodedInputs
from slipway_validate.protocol.messages import LongResult, LongSpec, long_file

OnLogits = Callable[[Logits, str], None]
"""Function that is called with the logits of each call and their place."""

Prompt = tuple[int, ...]

LONGEST_SPAN = 30
"""Most tokens of an answer within a text, as usual for SQuAD."""

Answer = tuple[float, ...]
Report = Callable[[str, int, int], None]


def generate(
    model: LanguageModel,
    prompt: tuple[int, ...],
    most: int,
    *,
    source: Source | None = None,
    stops: Collection[int] = (),
    banned: Collection[int] = (),
    banned_first: Collection[int] = (),
    on_logits: OnLogits = lambda logits, where: None,  # noqa: ARG005
) -> tuple[int, ...]:
    """Continue a prompt with the most likely token each time, through the KV cache if the model has one.

    Args:
        model: The model.
        prompt: Its tokens.
        most: Most tokens to generate.
        source: Input of the encoder, if there is one.
        stops: Tokens that end the text; the one that does is not returned.
        banned: Tokens that are never chosen.
        banned_first: Tokens that are not chosen first.
        on_logits: Called with the logits of each call.
    """
    tokens, past = list(prompt), None
    fresh = tokens
    while len(tokens) < len(prompt) + most:
        step = plain_step(fresh, past=past, past_length=len(tokens) - len(fresh), source=source)
        logits, cache = model.forward(step)
        on_logits(logits, f"greedy continuation, token {len(tokens)}")
        last = logits[0, -1].copy()
        never = {*banned, *(banned_first if len(tokens) == len(prompt) else ())}
        last[[token for token in never if token < len(last)]] = -np.inf
        chosen = int(last.argmax())
        if chosen in stops:
            break
        tokens = [*tokens, chosen]
        fresh, past = (tokens[-1:], cache) if model.has_cache else (tokens, None)
    return tuple(tokens[len(prompt) :])


def continue_long(
    model: LanguageModel, spec: LongSpec, sources: list[Source | None], folder: Path, *, on_logits: OnLogits
) -> LongResult:
    """Continue each prompt through the cache; compute one plain pass over that text, and over the reference's continuation.

    The logits at the tokens of the reference's continuation are written for the comparison; without one, those at the tokens of its own.
    """
    longest = max(map(len, spec.prompts)) + spec.new_tokens
    if not model.has_cache:
        return LongResult(skipped="the model has no KV cache")
    if longest - 1 > model.bounds.past:
        return LongResult(
            skipped=f"the engine accepts at most {model.bounds.past} cached tokens, {longest - 1} are needed"
        )
    continuations, divergences = [], []
    for index, (prompt, source) in enumerate(zip(spec.prompts, sources, strict=True)):
        own, cached = _decode(model, prompt, spec.new_tokens, source, folder / long_file(index), on_logits=on_logits)
        logits = _one_pass(model, prompt, own, source)
        continuations.append(own)
        divergences.append(_largest_divergence(logits, cached))
        if spec.given and spec.given[index] != own:
            logits = _one_pass(model, prompt, spec.given[index], source)
        np.save(folder / long_file(index), logits)
    return LongResult(continuations=tuple(continuations), cache_divergences=tuple(divergences))


def _decode(
    model: LanguageModel,
    prompt: tuple[int, ...],
    count: int,
    source: Source | None,
    file: Path,
    *,
    on_logits: OnLogits,
) -> tuple[tuple[int, ...], Logits]:
    """Continue a prompt; return the tokens, and the logits through the cache that chose them, (P, V), kept in a file."""
    kept: list[Logits] = []

    def keep(logits: Logits, where: str) -> None:
        on_logits(logits, where)
        if not kept:
            kept.append(open_memmap(file, mode="w+", dtype=np.float32, shape=(count, logits.shape[-1])))
        kept[0][written[0]] = logits[0, -1]
        written[0] += 1

    written = [0]
    return generate(model, prompt, count, source=source, on_logits=keep), kept[0]


def _one_pass(model: LanguageModel, prompt: tuple[int, ...], text: tuple[int, ...], source: Source | None) -> Logits:
    """Return the logits that predict each token of a text after a prompt, without the cache as far as the runtime allows: (P, V)."""
    ids: Ints = np.array([[*prompt, *text[:-1]]], dtype=np.int64)
    segments = segments_within(ids.shape[1], model.bounds)
    parts = [logits[0] for _, logits in run_segments(model, ids, np.ones_like(ids), segments, source=source)]
    return np.concatenate(parts)[len(prompt) - 1 :]


def _largest_divergence(plain: Logits, cached: Logits) -> float | None:
    """Return the mean KL of that part of a text in which the logits through the cache differ most from those of one pass."""
    comparer = LogitComparer()
    comparer.add(plain, cached)
    parts = comparer.result().kl_by_position
    return None if None in parts else max(part for part in parts if part is not None)


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
    continuations: list[Prompt] = []
    for start in range(0, len(prompts), size or 1):
        rows = list(range(start, min(start + size, len(prompts))))
        likely = [drafts[row] for row in rows] if drafts else []
        if likely and _writes(model, samples, rows, prompts, likely, check=check):
            continuations += likely
        else:
            continuations += _continue_batch(model, samples, rows, prompts, new_tokens, check=check)
    return tuple(continuations)


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


def answer_inputs(
    model: LanguageModel, family: Family, inputs: EncodedInputs, *, report: Report, sounds: Values | None = None
) -> Answers:
    """Return an answer to each input: token ids, logits of classes, classes of words, a span's first and last token, or a similarity.

    A speech model hears ``sounds``: the features of each input, (inputs, F, frames), or its samples, (inputs, S), with NaN behind the end.
    """
    if excess := find_excess(model, family, inputs):
        return Answers(skipped=excess)
    answer = _classes if family == SEQUENCE_CLASSIFIER else _ANSWERS[family.comparison]
    answers = []
    for number, each in enumerate(inputs.inputs, 1):
        if sounds is None:
            answers.append(answer(model, each, inputs))
        else:
            answers.append(_next_tokens(model, each, inputs, source=_heard(sounds[number - 1 : number])))
        report("answers", number, len(inputs.inputs))
    return Answers(answers=tuple(answers))


def find_excess(model: LanguageModel, family: Family, inputs: EncodedInputs) -> str:
    """Return why a model cannot answer inputs of this length; empty if it can."""
    longest = max(max(len(each.ids), len(each.second)) for each in inputs.inputs)
    if not family.generates and longest > model.bounds.sequence:
        return f"the engine accepts at most {model.bounds.sequence} tokens, an input has {longest}"
    first = len(inputs.start) if family.comparison is Comparison.TEACHER_FORCED and not family.takes_sound else longest
    needed = first + max(each.most for each in inputs.inputs)
    if family.generates and min(model.bounds.sequence, model.bounds.past + 1) < needed:
        return f"the engine accepts too few tokens: prompt and answer have up to {needed}"
    return ""


def write_text(model: LanguageModel, family: Family, inputs: EncodedInputs, *, on_logits: OnLogits) -> Prompt:
    """Return the tokens that a decoder, or an encoder–decoder of text, writes behind the first input.

    Args:
        model: The model.
        family: Its family.
        inputs: The input, with the tokens that end an answer.
        on_logits: As for :func:`generate`.
    """
    (given, *_), source = inputs.inputs, None
    if family.comparison is Comparison.TEACHER_FORCED:
        ids = _row(given.ids)
        source = Source(ids, np.ones_like(ids))
    first = given.ids if source is None else inputs.start
    stops, never = inputs.stops, inputs.banned
    return generate(model, first, given.most, source=source, stops=stops, banned=never, on_logits=on_logits)


def _heard(sound: Values) -> Source:
    """Return one sound as an encoder's input. sound: (1, F, frames), or (1, S) with NaN behind the end."""
    return whole_source(sound if sound.ndim > 2 else sound[:, ~np.isnan(sound[0])])


def _next_tokens(
    model: LanguageModel, given: EncodedInput, inputs: EncodedInputs, source: Source | None = None
) -> Answer:
    return generate(
        model,
        given.ids,
        given.most,
        source=source,
        stops=inputs.stops,
        banned=inputs.banned,
        banned_first=inputs.banned_first,
    )


def _target_tokens(model: LanguageModel, given: EncodedInput, inputs: EncodedInputs) -> Answer:
    ids = _row(given.ids)
    source = Source(ids, np.ones_like(ids))
    return generate(model, inputs.start, given.most, source=source, stops=inputs.stops, banned=inputs.banned)


def _classes(model: LanguageModel, given: EncodedInput, inputs: EncodedInputs) -> Answer:  # noqa: ARG001 - as the others
    return tuple(float(value) for value in _forward(model, given.ids).ravel())


def _words(model: LanguageModel, given: EncodedInput, inputs: EncodedInputs) -> Answer:  # noqa: ARG001 - as the others
    """Return the class of each word; -1 for one that was cut off."""
    best = _forward(model, given.ids).argmax(axis=-1)
    return tuple(float(best[place]) if place >= 0 else -1.0 for place in given.keep)


def _span(model: LanguageModel, given: EncodedInput, inputs: EncodedInputs) -> Answer:  # noqa: ARG001 - as the others
    """Return the numbers of the first and last token of the best answer within the context."""
    start, end = _forward(model, given.ids)[:, list(given.keep)]
    sums = start[:, None] + end[None]
    length = np.arange(len(end))[None] - np.arange(len(start))[:, None]
    sums[(length < 0) | (length >= LONGEST_SPAN)] = -np.inf
    first, last = np.unravel_index(int(sums.argmax()), sums.shape)
    return (float(first), float(last))


def _similarity(model: LanguageModel, given: EncodedInput, inputs: EncodedInputs) -> Answer:  # noqa: ARG001 - as the others
    """Return the cosine of two texts' vectors: the sentence embedding if the model has one, otherwise the mean of its tokens."""
    first, second = (_vector(model, ids) for ids in (given.ids, given.second))
    length = float(np.linalg.norm(first) * np.linalg.norm(second))
    return (float(first @ second) / length if length else 0.0,)


def _vector(model: LanguageModel, ids: tuple[int, ...]) -> Logits:
    if model.embeds:
        vector: Logits = model.embed(_step(ids))[0, 0]
        return vector
    mean: Logits = _forward(model, ids).mean(axis=0)
    return mean


def _forward(model: LanguageModel, ids: tuple[int, ...]) -> Logits:
    results, _ = model.forward(_step(ids))
    logits: Logits = results[0]
    return logits


def _step(ids: tuple[int, ...]) -> Step:
    row = _row(ids)
    mask = np.ones_like(row)
    return Step(row, mask, positions_of(mask))


def _row(ids: tuple[int, ...]) -> Ints:
    return np.array([ids], dtype=np.int64)


_ANSWERS: Mapping[Comparison, Callable[[LanguageModel, EncodedInput, EncodedInputs], Answer]] = {
    Comparison.NEXT_TOKEN: _next_tokens,
    Comparison.TEACHER_FORCED: _target_tokens,
    Comparison.CLASSES: _words,
    Comparison.SPANS: _span,
    Comparison.EMBEDDINGS: _similarity,
}
