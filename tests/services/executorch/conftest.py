"""The stage run in a work folder of its own, its program loaded as validation loads it, and PyTorch's results for the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.stage import Context
from slipway_executorch.params import ExecutorchParams
from slipway_executorch.stage import STAGE

Export = Callable[..., tuple[Path, Context]]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Return a function that exports a folder and returns the output and the context."""
    pytest.importorskip("executorch", reason="the extra executorch is not installed")

    def call(source: Path, **params: Any) -> tuple[Path, Context]:
        ctx = Context(workdir=tmp_path)
        return STAGE.run({"pytorch": source}, ExecutorchParams(**params), ctx)["executorch"], ctx

    return call


def torch_results(folder: Path, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Return PyTorch's results for rows of tokens, as validation compares them."""
    from slipway.proof.runtime import Step, positions_of
    from slipway.proof.transformers_runtime import load

    mask = np.ones_like(ids) if mask is None else mask
    model = load(folder, threads=1)
    model.prepare_comparison()
    return model.forward(Step(ids, mask, positions_of(mask)))[0]
