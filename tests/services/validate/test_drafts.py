"""Greedy continuations: a model that would write the reference's text is shown it as a whole, any other writes its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipway.proof.numerics import Logits
from slipway.proof.runtime import Bounds, Past, Samples, Step
from slipway.validation.speed import Engine
from slipway_validate.params import EVIDENCE
from slipway_validate.runner.generation.generating import continue_greedily

VALUES = 32
PROMPTS = ((1, 2, 3), (7, 8, 9), (20, 21, 22))
WRITTEN = ((4, 5, 6, 7), (10, 11, 12, 13), (23, 24, 25, 26))


class CountsUp:
    """A model for which the next token is the last one plus one, or, after a token that it knows, another one."""

    device, native_dtype, architecture = "cpu", "float32", ""
    engine = Engine(runtime="none")

    def __init__(self, *, odd: int = -1, cache: bool = True, bounds: Bounds = Bounds()) -> None:  # noqa: B008 - immutable
        self.calls: list[tuple[int, ...]] = []
        self.has_cache, self.bounds, self._odd = cache, bounds, odd

    def forward(self, step: Step) -> tuple[Logits, Past]:
        rows, columns = step.input_ids.shape
        past = 0 if step.past is None else step.past
        assert step.attention_mask.shape == (rows, past + columns)
        assert step.position_ids[0].tolist() == list(range(past, past + columns))
        self.calls.append(step.input_ids.shape)
        chosen = np.where(step.input_ids == self._odd, 0, (step.input_ids + 1) % VALUES)
        return np.eye(VALUES, dtype=np.float32)[chosen], past + columns


def continued(model: Any, drafts: Any = WRITTEN, samples: Samples | None = None) -> tuple[tuple[int, ...], ...]:
    samples = samples or Samples(np.arange(12).reshape(3, 4))
    return continue_greedily(model, samples, PROMPTS, 4, drafts=drafts, check=lambda logits, where: None)


def test_what_a_model_would_write_takes_two_calls_through_its_cache() -> None:
    model = CountsUp()
    assert continued(model) == WRITTEN
    assert model.calls == [(3, 3), (3, 3)]


def test_without_a_cache_it_takes_one_call() -> None:
    model = CountsUp(cache=False)
    assert continued(model) == WRITTEN
    assert model.calls == [(3, 6)]


def test_with_an_encoder_it_takes_one_call() -> None:
    """Graphs of encoder–decoders promise one token after a cache."""
    model = CountsUp()
    samples = Samples(np.arange(12).reshape(3, 4), source=np.ones((3, 4), np.int64))
    assert continued(model, samples=samples) == WRITTEN
    assert model.calls == [(3, 6)]


@pytest.mark.parametrize("odd", [3, 10, 25])
def test_a_model_that_chooses_any_other_token_writes_its_own_text(odd: int) -> None:
    """First, within, and last: the result is that of a model without a draft."""
    model, alone = CountsUp(odd=odd), CountsUp(odd=odd)
    found = continued(model)
    assert found == continued(alone, drafts=()) != WRITTEN
    assert alone.calls == [(3, 3), (3, 1), (3, 1), (3, 1)]
    assert model.calls == [(3, 3), (3, 3), *alone.calls]


def test_rows_that_do_not_fit_together_are_judged_alone() -> None:
    model = CountsUp(odd=10, bounds=Bounds(batch=1))
    found = continued(model)
    assert found == (WRITTEN[0], (10, 0, 1, 2), WRITTEN[2])
    assert model.calls == [(1, 3), (1, 3), (1, 3), (1, 3), (1, 3), (1, 1), (1, 1), (1, 1), (1, 3), (1, 3)]


@pytest.mark.parametrize("bounds", [Bounds(sequence=2), Bounds(past=2)])
def test_a_draft_beyond_the_bounds_of_an_engine_is_not_computed(bounds: Bounds) -> None:
    model = CountsUp(bounds=bounds)
    assert continued(model) == WRITTEN
    assert model.calls == [(3, 3), (3, 1), (3, 1), (3, 1)]


def test_all_of_a_draft_is_searched_for_values_that_are_not_finite() -> None:
    seen: list[tuple[int, ...]] = []
    samples = Samples(np.arange(12).reshape(3, 4))
    continue_greedily(
        CountsUp(), samples, PROMPTS, 4, drafts=WRITTEN, check=lambda logits, where: seen.append(logits.shape)
    )
    assert seen == [(3, 3, VALUES), (3, 3, VALUES)]


def test_only_thorough_computes_every_token() -> None:
    assert {name: each.drafts for name, each in EVIDENCE.items()} == {
        "quick": True,
        "standard": True,
        "thorough": False,
    }
