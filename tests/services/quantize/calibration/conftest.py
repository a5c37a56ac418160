"""A trained model of one layer, text for it, and the stage run on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.stage import Context
from slipway_quantize.calibration.params import CalibrateParams
from slipway_quantize.calibration.stage import STAGE
from support.models.calibrated_models import SMALL, Material, shortened, write_data


@pytest.fixture(scope="session")
def material(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Material:
    root = tmp_path_factory.mktemp("calibration")
    text = (sample / "heldout" / "heldout.txt").read_text(encoding="utf-8")
    half = len(text) // 2
    data = write_data(root / "data", [text[start : start + 2000] for start in range(0, half, 2000)])
    return Material(shortened(sample, root / "model"), data, text[half:])


@pytest.fixture
def calibrate(tmp_path: Path) -> Callable[..., tuple[Path, Context]]:
    """Runs the stage in a work folder of its own."""
    runs = iter(range(100))

    def call(
        model: Path, data: Path, *, granted: int = 1, kept: Path | None = None, **params: Any
    ) -> tuple[Path, Context]:
        workdir = tmp_path / f"attempt-{next(runs)}"
        workdir.mkdir()
        ctx = Context(workdir=workdir, log=logging.getLogger("test"), threads=granted, kept=kept)
        made = STAGE.run({"model": model, "data": data}, CalibrateParams(**{**SMALL, **params}), ctx)
        return made["calibration"], ctx

    return call
