"""The stages run in a work folder of their own, and models in which a fault is planted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.stage import Context

Export = Callable[..., tuple[Path, Context]]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Return a function that runs a stage on a folder and returns the output and the context."""
    pytest.importorskip("torch", reason="the extra torchscript is not installed")
    from slipway_torchscript.stage import TORCH_EXPORT, TORCHSCRIPT

    def call(source: Path, stage: str = "torchscript", **params: Any) -> tuple[Path, Context]:
        chosen = {each.name: each for each in (TORCHSCRIPT, TORCH_EXPORT)}[stage]
        ctx = Context(workdir=tmp_path)
        return chosen.run({"pytorch": source}, chosen.params(**params), ctx)[stage], ctx

    return call


def torch_results(folder: Path, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return PyTorch's results for rows of tokens, as validation compares them."""
    from slipway.proof.runtime import Step, positions_of
    from slipway.proof.transformers_runtime import load

    model = load(folder, threads=1)
    model.prepare_comparison()
    return model.forward(Step(ids, mask, positions_of(mask)))[0]


def step(ids: np.ndarray, mask: np.ndarray, start: int = 0, past: Any = None) -> Any:
    """Return the call of columns from ``start`` on."""
    from slipway.proof.runtime import Step, positions_of

    return Step(ids[:, start:], mask, positions_of(mask)[:, start:], past)


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference, as a share of the largest wanted value and of 1."""
    return float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()))
