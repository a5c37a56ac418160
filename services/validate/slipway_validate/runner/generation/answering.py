"""Answer the user's test inputs with one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from slipway.model.families import SEQUENCE_CLASSIFIER, SPEECH, Comparison, Family
from slipway.proof.numerics import Ints, Logits
from slipway.proof.runtime import LanguageModel, Source, Step, positions_of
from slipway.proof.samples import Values
from slipway_validate.protocol.messages import Answers, EncodedInput, EncodedInputs
from slipway_validate.runner.generation.generating import generate

LONGEST_SPAN = 30
"""Most tokens of an answer within a text, as usual for SQuAD."""

Answer = tuple[float, ...]
Report = Callable[[str, int, int], None]


def answer_inputs(
    model: LanguageModel, family: Family, inputs: EncodedInputs, *, report: Report, sounds: Values | None = None
) -> Answers:
    """Return an answer to each input: token ids, logits of classes, classes of words, a span's first and last token, or a similarity.

    A speech model hears ``sounds``, the features of each input, (inputs, F, frames).
    """
    longest = max(max(len(each.ids), len(each.second)) for each in inputs.inputs)
    if not family.generates and longest > model.bounds.sequence:
        return Answers(skipped=f"the engine accepts at most {model.bounds.sequence} tokens, an input has {longest}")
    first = len(inputs.start) if family.comparison is Comparison.TEACHER_FORCED and family != SPEECH else longest
    needed = first + max(each.most for each in inputs.inputs)
    if family.generates and min(model.bounds.sequence, model.bounds.past + 1) < needed:
        return Answers(skipped=f"the engine accepts too few tokens: prompt and answer have up to {needed}")
    answer = _classes if family == SEQUENCE_CLASSIFIER else _ANSWERS[family.comparison]
    answers = []
    for number, each in enumerate(inputs.inputs, 1):
        if sounds is None:
            answers.append(answer(model, each, inputs))
        else:
            answers.append(_next_tokens(model, each, inputs, source=Source(sounds[number - 1 : number])))
        report("answers", number, len(inputs.inputs))
    return Answers(answers=tuple(answers))


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
