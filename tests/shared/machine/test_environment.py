"""Variables that are set for a while."""

from __future__ import annotations

import contextlib
import os

import pytest

from slipway.machine.processes import set_variable


@pytest.mark.parametrize("before", [None, "own"])
def test_a_variable_is_as_before_however_the_block_ends(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv("FOR_A_WHILE", raising=False)
    if before is not None:
        monkeypatch.setenv("FOR_A_WHILE", before)
    with contextlib.suppress(KeyError), set_variable("FOR_A_WHILE", "1"):
        assert os.environ["FOR_A_WHILE"] == "1"
        raise KeyError
    assert os.environ.get("FOR_A_WHILE") == before
