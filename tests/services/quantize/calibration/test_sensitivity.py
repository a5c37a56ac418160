"""What each weight adds alone is measured on held-out text, and a size budget that is spent by it beats the levels on both sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from slipway.stage import Context
from slipway_quantize.params import QuantizeParams
from slipway_quantize.report import weight_bytes
from slipway_quantize.stage import STAGE
from support.models.calibrated_models import Material
from support.models.quantize_models import divergence, torch_logits

pytestmark = pytest.mark.slow


def test_a_budget_spent_by_sensitivity_is_below_the_line_between_the_levels(
    calibrate: Callable[..., tuple[Path, Context]], material: Material, tmp_path: Path
) -> None:
    folder, _ = calibrate(material.model, material.data, method="rtn", sensitivity=True, time_budget_seconds=60)
    described = json.loads((folder / "calibration.json").read_text())
    alone = {name: entry["divergence"] for name, entry in described["weights"].items()}
    assert min(alone.values()) >= 0
    assert 0.5 < sum(alone.values()) / described["divergence"]["rtn"] < 2, "errors add up"
    tokens = AutoTokenizer.from_pretrained(material.model)(material.other)["input_ids"]
    heldout = np.array(tokens[: 8 * 96], np.int64).reshape(8, 96)
    exact = torch_logits(material.model, heldout)

    def made(tag: str, **params: int) -> tuple[int, float]:
        workdir = tmp_path / tag
        workdir.mkdir()
        inputs = {"model": material.model, "calibration": folder}
        given = QuantizeParams(format="pytorch", level="int4", check=False, **params)
        result = STAGE.run(inputs, given, Context(workdir=workdir))["model"]
        return weight_bytes(result), divergence(exact, torch_logits(result, heldout))[0]

    # Eight bits for all of them, the head too: the level int8 keeps a tied head as it is.
    (least, worst), (most, best) = made("4"), made("8", size_budget_bytes=1 << 30)
    before = worst
    for share in (0.3, 0.7):
        size, found = made(f"{share}", size_budget_bytes=int(least + share * (most - least)))
        assert found < worst + (size - least) / (most - least) * (best - worst)
        assert found <= before
        before = found
