"""Layers that get 8 bits: the most costly within a share, joined ones together; and what the rounding of the others gains by refining."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipway_quantize.calibration.rounding.grid import Fitted, Grid
from slipway_quantize.calibration.rounding.methods import damp, error_factors, gptq, refine_places, refit_scales
from slipway_quantize.calibration.widths import wide_layers

LAYERS = {
    f"layers.{layer}.{name}.weight": 100 for layer in range(2) for name in ("q_proj", "k_proj", "v_proj", "down_proj")
}


def test_the_most_costly_layers_within_the_share_are_wide() -> None:
    costs = dict.fromkeys(LAYERS, 0.01) | {"layers.1.down_proj.weight": 1.0}
    assert wide_layers(costs, LAYERS, bits=4, share=0.125) == {"layers.1.down_proj.weight"}
    assert wide_layers(costs, LAYERS, bits=4, share=0.1) == frozenset()
    assert wide_layers(costs, LAYERS, bits=4, share=1.0) == LAYERS.keys()


def test_layers_that_are_served_as_one_have_the_same_bits() -> None:
    costs = dict.fromkeys(LAYERS, 0.001) | {"layers.0.v_proj.weight": 1.0}
    joined = {f"layers.0.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")}
    assert wide_layers(costs, LAYERS, bits=4, share=0.4) == joined


def test_refining_brings_results_nearer() -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 128, generator=draw)
    inputs = torch.randn(512, 128, generator=draw) @ torch.randn(128, 128, generator=draw)
    moments, grid = inputs.T @ inputs, Grid(4, 32, False, torch.float32)
    order, factors = error_factors(moments)
    fitted = grid.fit(weight, moments.diagonal())
    places = gptq(weight, fitted, grid, order, factors)

    def error(places: torch.Tensor, fitted: Fitted) -> float:
        difference = grid.values(grid.nearest(places), fitted) - weight
        return float(((difference @ moments) * difference).sum())

    stiff, before = damp(moments), error(places, fitted)
    fitted = refit_scales(weight, places, fitted, grid, stiff)
    scaled = error(places, fitted)
    places = refine_places(weight, places, fitted, grid, order=order, moments=stiff)
    assert error(places, fitted) < scaled < before


@pytest.mark.slow
def test_a_calibration_holds_wide_layers(material: Any, calibrate: Any) -> None:
    folder, ctx = calibrate(material.model, material.data, head=False, method="gptq", wide_share=0.3)
    stored = load_file(folder / "weights.safetensors")
    wide = {name for name, codes in stored.items() if name.endswith(".codes") and int(codes.abs().max()) > 8}
    sizes = {name: codes.numel() for name, codes in stored.items() if name.endswith(".codes")}
    assert len(wide) == ctx.facts["wide_layers"] > 0
    assert sum(sizes[name] for name in wide) <= 0.3 * sum(sizes.values())
    narrow, _ = calibrate(material.model, material.data, head=False, method="gptq")
    assert ctx.facts["divergence"]["gptq"] < 0.8 * _divergence(narrow)


def _divergence(folder: Any) -> float:
    return float(json.loads((folder / "calibration.json").read_text())["divergence"]["gptq"])
