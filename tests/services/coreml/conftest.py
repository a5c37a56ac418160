"""The stage run in a work folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.stage import Context
from slipway_coreml.params import CoremlParams
from slipway_coreml.stage import STAGE

Export = Callable[..., Path]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Return a function that exports a folder and returns the output."""
    pytest.importorskip("coremltools", reason="the extra coreml is not installed")

    def call(source: Path, work: str = "work", **params: Any) -> Path:
        folder = tmp_path / work
        folder.mkdir()
        return STAGE.run({"pytorch": source}, CoremlParams(**params), Context(workdir=folder))["coreml"]

    return call
