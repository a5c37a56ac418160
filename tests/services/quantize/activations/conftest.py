"""A trained model of one layer with text for it, also as a graph, and the stage run on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE
from support.models.calibrated_models import shortened, write_data
from support.models.quantize_models import scale_features

SCALED = 7
"""The feature that is scaled."""


@dataclass(frozen=True)
class Trained:
    """A model, its graph, the same with one feature of the MLP scaled by 2^16 and back, and their text."""

    model: Path
    graph: Path
    scaled_model: Path
    scaled_graph: Path
    data: Path


def export(model: Path, workdir: Path) -> Path:
    workdir.mkdir()
    return EXPORT.run({"pytorch": model}, OnnxExportParams(parity="never"), Context(workdir=workdir))["onnx"]


@pytest.fixture(scope="session")
def trained(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("activations")
    text = (sample / "heldout" / "heldout.txt").read_text(encoding="utf-8")
    model = shortened(sample, root / "model")
    scaled = scale_features(model, root / "scaled", layer=0, feature=SCALED, by=2.0**16)
    return Trained(
        model,
        export(model, root / "graph"),
        scaled,
        export(scaled, root / "scaled-graph"),
        write_data(root / "data", [text[start : start + 2000] for start in range(0, 24_000, 2000)]),
    )


@pytest.fixture(scope="session")
def at_level(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Context]]:
    """Gives the graph at a level, with its text: made once for all tests, which only read it."""

    @cache
    def call(level: str) -> tuple[Path, Context]:
        ctx = Context(workdir=tmp_path_factory.mktemp(level), log=logging.getLogger("test"), threads=1)
        inputs = {"model": trained.graph, "data": trained.data}
        return STAGE.run(inputs, QuantizeParams(format="onnx", level=level), ctx)["model"], ctx

    return call


@pytest.fixture
def quantize(tmp_path: Path) -> Callable[..., tuple[Path, Context]]:
    """Runs the stage in a work folder of its own."""
    runs = iter(range(100))

    def call(
        source: Path, data: Path | None = None, *, threads: int = 1, pytorch: Path | None = None, **params: Any
    ) -> tuple[Path, Context]:
        workdir = tmp_path / f"attempt-{next(runs)}"
        workdir.mkdir()
        ctx = Context(workdir=workdir, log=logging.getLogger("test"), threads=threads)
        inputs = {name: path for name, path in {"model": source, "data": data, "pytorch": pytorch}.items() if path}
        return STAGE.run(inputs, QuantizeParams(**params), ctx)["model"], ctx

    return call
