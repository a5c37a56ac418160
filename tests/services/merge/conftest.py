"""The factory of merge cases, bound to each test's own folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from support.models import merge_cases

_COMPILERS = ("CC", "CXX")


@pytest.fixture(autouse=True)
def compiler_kept() -> Iterator[None]:
    """Put back what peft's BOFT sets to look for a CUDA compiler: two variables and a folder on the path."""
    path, before = list(sys.path), {name: os.environ.pop(name, None) for name in _COMPILERS}
    yield
    sys.path[:] = path
    for name in _COMPILERS:
        os.environ.pop(name, None)
    os.environ |= {name: value for name, value in before.items() if value is not None}


@pytest.fixture
def make_case(tmp_path: Path) -> Callable[..., merge_cases.Case]:
    return partial(merge_cases.make_case, tmp_path)
