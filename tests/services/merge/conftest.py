"""The factory of merge cases, bound to each test's own folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from support.models import merge_cases
from support.models.compiler_variables import compiler_kept


@pytest.fixture(autouse=True)
def _compiler_kept() -> Iterator[None]:
    with compiler_kept():
        yield


@pytest.fixture
def make_case(tmp_path: Path) -> Callable[..., merge_cases.Case]:
    return partial(merge_cases.make_case, tmp_path)
