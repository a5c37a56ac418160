"""Layers make up for a share of what roundings before them have changed of their inputs, against the definition."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor

from slipway.model.folder import ModelFolder
from slipway_quantize.calibration.finished import Finished
from slipway_quantize.calibration.rounding.grid import Grid
from slipway_quantize.calibration.rounding.methods import (
    BY_INPUTS,
    SHARE,
    Corrected,
    best_method,
    correction,
    damp,
    error_factors,
    read_rounded,
    round_layer,
)
from slipway_quantize.calibration.rounding.rounds import Rounds, _passes
from slipway_quantize.calibration.streaming import layers
from slipway_quantize.calibration.streaming.crew import Crew
from slipway_quantize.calibration.streaming.layers import Layer
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.streaming.moments import Inputs, Moments, Reached, merge_moments
from slipway_quantize.calibration.streaming.walk import BlockWalk
from slipway_quantize.calibration.windows import Batch, Windows
from support.models.calibrated_families import save

K, N = 32, 12


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def linear(random: torch.Generator, *, results: int = N, inputs: int = K, name: str = "layer") -> Layer:
    module = torch.nn.Linear(inputs, results, bias=False)
    return Layer(name, module, torch.randn(results, inputs, generator=random))


def texts(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return exact inputs, and the same after roundings whose errors follow from them."""
    exact = torch.randn(4, 64, K, generator=random) @ torch.randn(K, K, generator=random)
    error = 0.1 * torch.randn(K, K, generator=random)
    return exact, exact + exact @ error


def seen(layer: Layer, exact: Tensor, inputs: Tensor, mask: Tensor) -> Moments:
    noted, moments = Inputs([layer.name], to_the_end=False), Moments([layer.name])
    for observer, given in ((noted, exact), (moments, inputs)):
        if isinstance(observer, Moments):
            observer.begin((mask,), noted.found)
        else:
            observer.begin((mask,))
        with observer.watch([layer]), pytest.raises(Reached):
            layer.module(given)
    return moments


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_corrected_weight_is_that_of_the_definition(
    random: torch.Generator, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr(layers, "PIECE_WEIGHTS", K * N // pieces)  # no weight of a test has 16 million numbers
    layer, (exact, inputs) = linear(random), texts(random)
    mask = torch.ones(4, 64)
    mask[1, 40:] = 0  # padding says nothing
    halves = [seen(layer, exact[part], inputs[part], mask[part]) for part in (slice(0, 2), slice(2, 4))]
    moments = merge_moments(halves)
    drift = moments.drift_of("layer")
    assert drift is not None
    own = layer.stored.clone()
    corrected = Corrected(layer, correction(drift, *error_factors(moments.of("layer"))))
    assert len(corrected.pieces) == pieces
    found = torch.cat([corrected.exact(rows) for rows in corrected.pieces]).double().numpy()

    rows, wanted = (each[mask == 1].double().numpy() for each in (inputs, exact))
    weight, energy = own.double().numpy(), damp(moments.of("layer")).double().numpy()
    expected = weight + SHARE * weight @ ((wanted - rows).T @ rows) @ np.linalg.inv(energy)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())

    def missed(of: np.ndarray) -> float:
        return float(np.square(rows @ of.T - wanted @ weight.T).sum())

    assert missed(found) < 0.5 * missed(weight)
    assert torch.equal(layer.stored, own), "the model's own weight is as it was"


def test_inputs_that_roundings_have_not_changed_leave_the_weight(random: torch.Generator) -> None:
    layer, (exact, _) = linear(random), texts(random)
    moments = seen(layer, exact, exact, torch.ones(4, 64))
    drift = moments.drift_of("layer")
    assert drift is not None
    corrected = Corrected(layer, correction(drift, *error_factors(moments.of("layer"))))
    assert torch.equal(corrected.exact(slice(0, N)), layer.stored)


def test_an_expert_is_not_corrected(random: torch.Generator) -> None:
    """The rounded model may send other tokens to it than the exact one, as many or not."""
    layer, (exact, inputs) = linear(random), texts(random)
    moments = seen(layer, exact.flatten(0, 1)[:99], inputs.flatten(0, 1)[:99], torch.ones(4, 64))
    assert moments.drift_of("layer") is None
    assert len(moments.of("layer")) == K


def test_a_layer_that_computes_twice_is_not_corrected(random: torch.Generator) -> None:
    layer, other = linear(random), linear(random, name="other")
    noted = Inputs(["layer", "other"], to_the_end=True)
    noted.begin((torch.ones(4, 64),))
    exact, inputs = texts(random)
    with noted.watch([layer, other]):
        for layer_of, given in ((layer, exact), (layer, inputs), (other, exact)):
            layer_of.module(given)  # to the end: nothing is raised once all were seen
    assert set(noted.found) == {"other"}


def test_a_layer_with_wider_inputs_is_rounded_after_the_others(random: torch.Generator) -> None:
    keys = linear(random, results=16, name="keys")  # fewer results than inputs, and no later for it
    up, down = linear(random, results=64, name="up"), linear(random, inputs=64, name="down")
    assert _passes([keys, up, down], corrects=True) == [frozenset({"keys", "up"}), frozenset({"down"})]
    assert _passes([keys, up, down], corrects=False) == [frozenset({"keys", "up", "down"})]
    assert _passes([down], corrects=True) == [frozenset({"down"})]
    assert _passes([], corrects=True) == []


@pytest.mark.parametrize("bits", [4, 8])
def test_tuning_starts_from_the_codes_that_a_corrected_weight_has(random: torch.Generator, bits: int) -> None:
    layer, (exact, inputs) = linear(random), texts(random)
    moments = seen(layer, exact, inputs, torch.ones(4, 64))
    drift = moments.drift_of("layer")
    assert drift is not None
    corrected = Corrected(layer, correction(drift, *error_factors(moments.of("layer"))))
    grid = Grid(bits, 16, True, torch.float32)
    found = round_layer(corrected, "rtn", grid)
    assert not torch.equal(found.weight.codes, round_layer(layer, "rtn", grid).weight.codes)
    assert torch.equal(grid.nearest(found.places_of(layer, slice(0, N))).to(torch.int8), found.weight.codes)


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("name", ["phi3", "t5"])
def test_each_batch_is_compared_with_itself(name: str, members: int, tmp_path: Path) -> None:
    """Of the last block, after the others were rounded, against hooks on transformers' own model."""
    models = [
        StreamedModel(ModelFolder.open(save(name, tmp_path / "model")), group_size=32, head=False)
        for _ in range(members)
    ]
    windows = Windows((), (), "", 0, models[0].start)
    tokens = torch.arange(1, 200) * 37 % 1024
    batches = [windows.batch([tokens[:length] + length]) for length in (11, 24, 9, 17)]
    folder = tmp_path / "kept"
    folder.mkdir()
    walks = [BlockWalk(model, batches, folder) for model in models]
    exact = [walk.with_batches(batches[1:], "exact") for walk in walks]
    finished, grid = Finished(folder, "identity"), Grid(4, 32, True, torch.float32)
    mine = getattr(tf, models[0].family.auto_class).from_pretrained(tmp_path / "model").eval()
    rounded = copy.deepcopy(mine)
    last = len(walks[0].names) - 2
    with Crew(members, threads=2) as crew:
        rounds = Rounds(
            walks,
            exact=exact,
            crew=crew,
            judging=1,
            methods=BY_INPUTS,
            choices=BY_INPUTS,
            grid=grid,
            wide={},
            embedded={},
            finished=finished,
            on_block=lambda _: None,
        )
        for index in range(last):
            rounds._block(index)
            for weight, errors in finished.facts(f"block-{index}")["errors"].items():
                one = read_rounded(finished.get(f"block-{index}"), weight, best_method(errors, BY_INPUTS), grid)
                rounded.get_parameter(weight).data = one.weight.rows(slice(None))
        names = frozenset(layer.name for layer in walks[0].layers(last))
        _, fit = rounds._moments(last, names, {}, last=False)
    assert fit.drifts
    for weight, drift in fit.drifts.items():
        ideal, given = (hooked(model, weight, batches[1:]) for model in (mine, rounded))
        expected = (ideal - given).T @ given
        torch.testing.assert_close(drift, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
        torch.testing.assert_close(fit.of(weight), given.T @ given, rtol=1e-3, atol=1e-3 * float(given.square().sum()))


@torch.no_grad()
def hooked(model: Any, weight: str, batches: list[Batch]) -> Tensor:
    """Return the inputs of a layer at all positions of some batches. (positions, K)"""
    found: list[Tensor] = []
    layer = model.get_submodule(weight.removesuffix(".weight"))
    hook = layer.register_forward_pre_hook(lambda _, given: found.append(given[0].flatten(0, 1)))
    for batch in batches:
        more = {} if batch.decoder is None else {"decoder_input_ids": batch.decoder}
        model(input_ids=batch.tokens, **more)
    hook.remove()
    return torch.cat(found)
