"""The budget decides how much is computed, and the model's size how many copies of it compute side by side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipway_quantize.calibration.effort import Effort, plan_effort
from slipway_quantize.calibration.params import CalibrateParams


def planned(*, layers: int, width: int, vocabulary: int, **params: Any) -> Effort:
    """Plan for the shapes of a decoder whose head is tied to its embedding."""
    block = [(width, width)] * 4 + [(3 * width, width)] * 2 + [(width, 3 * width)]
    shapes = [*block * layers, (vocabulary, width)]
    stored = {
        str(index): SimpleNamespace(stored=torch.empty(shape, device="meta")) for index, shape in enumerate(shapes)
    }
    model: Any = SimpleNamespace(layers=stored, vocabulary=vocabulary, tied="embedding", tunes_hidden_states=False)
    return plan_effort(model, CalibrateParams.model_validate({"threads": 2, **params}))


def test_a_small_model_is_tuned_in_two_copies() -> None:
    effort = planned(layers=4, width=256, vocabulary=1024, method="autoround")
    assert (effort.members, effort.at_once, effort.steps) == (2, 4, 100)
    assert not effort.save_memory


def test_one_thread_has_one_copy() -> None:
    one = planned(layers=4, width=256, vocabulary=1024, threads=1)
    assert (one.members, one.at_once) == (1, 8)


@pytest.mark.parametrize(
    ("layers", "width", "vocabulary"),
    [(4, 256, 151_936), (28, 1024, 151_936), (24, 1024, 1024)],
    ids=["large results", "both large", "blocks computed again"],
)
def test_what_is_large_has_one_copy(layers: int, width: int, vocabulary: int) -> None:
    effort = planned(layers=layers, width=width, vocabulary=vocabulary, method="autoround")
    assert effort.members == 1
    assert effort.steps > 0


def test_a_pass_over_blocks_has_two_copies_where_their_results_take_no_more_room() -> None:
    two = planned(layers=30, width=576, vocabulary=49_152)
    assert (two.members, two.at_once) == (2, 2)  # five windows' results at once, if it had one copy
    assert planned(layers=30, width=576, vocabulary=151_936).members == 1
    assert planned(layers=4, width=4096, vocabulary=1024).members == 1  # products that two threads share well


def test_a_model_that_is_too_large_to_tune_is_rounded_with_more_text() -> None:
    large = {"layers": 28, "width": 1024, "vocabulary": 151_936}
    auto, tuned = planned(**large), planned(**large, method="autoround")
    assert (auto.steps, auto.members) == (0, 1)
    assert tuned.steps > 0
    assert auto.windows >= tuned.windows
