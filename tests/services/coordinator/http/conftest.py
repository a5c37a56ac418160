"""A coordinator that takes JSON over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.coordinators.http_places import HttpPlace


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpPlace]:
    with HttpPlace(tmp_path_factory.mktemp("http")) as place:
        yield place
