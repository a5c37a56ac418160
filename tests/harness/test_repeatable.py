"""Tests and fixtures draw the same random numbers in every order of the tests."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

FIRST = (random.Random(0).random(), np.random.RandomState(0).rand(), torch.Generator().manual_seed(0))


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


EXPECTED = (*FIRST[:2], torch.rand((), generator=FIRST[2]).item())


@pytest.fixture(scope="module")
def wide() -> tuple[float, float, float]:
    return drawn()


@pytest.fixture
def own(wide: tuple[float, float, float]) -> tuple[float, float, float]:
    return drawn()


@pytest.mark.parametrize("number", range(3))
def test_each_draws_as_if_it_were_the_first(
    number: int, wide: tuple[float, float, float], own: tuple[float, float, float]
) -> None:
    assert wide == own == drawn() == EXPECTED
