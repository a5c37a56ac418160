"""The factory of merge cases, bound to each test's own folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import merge_cases


@pytest.fixture
def make_case(tmp_path: Path) -> Callable[..., merge_cases.Case]:
    return partial(merge_cases.make_case, tmp_path)
