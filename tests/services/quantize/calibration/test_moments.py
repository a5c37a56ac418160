"""Second moments of a layer's inputs say what a rounding adds to its results, whoever has observed which batch."""

from __future__ import annotations

import pytest
import torch

from slipway_quantize.calibration.streaming import layers
from slipway_quantize.calibration.streaming.layers import Layer
from slipway_quantize.calibration.streaming.moments import Moments, Reached, merge_moments, relative_errors


class Weight:
    """A weight that is not on a grid."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def rows(self, rows: slice) -> torch.Tensor:
        return self._values[rows]


def observed(layer: Layer, batches: list[torch.Tensor]) -> Moments:
    moments = Moments([layer.name])
    with moments.watch([layer]):
        for batch in batches:
            moments.begin((torch.ones(batch.shape[:2]),))
            with pytest.raises(Reached):
                layer.module(batch)
    return moments


def test_errors_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "PIECE_WEIGHTS", 16 * 5)  # the weight is worked on in pieces
    random = torch.Generator().manual_seed(0)
    exact = torch.randn(12, 16, generator=random)
    layer = Layer("layer", torch.nn.Linear(16, 12, bias=False), exact)
    assert len(layer.pieces) == 3
    batches = list(torch.randn(4, 2, 9, 16, generator=random))
    found = merge_moments([observed(layer, batches[0::2]), observed(layer, batches[1::2])])
    inputs = torch.cat(batches).flatten(0, 1)
    torch.testing.assert_close(found.of("layer"), inputs.T @ inputs, rtol=1e-5, atol=1e-4)

    roundings = {"near": exact + 0.01 * torch.randn(12, 16, generator=random), "same": exact, "none": 0 * exact}
    errors = relative_errors(layer, {name: Weight(values) for name, values in roundings.items()}, found.of("layer"))
    for name, values in roundings.items():
        added = inputs @ (values - exact).T
        expected = float(added.square().sum() / (inputs @ exact.T).square().sum())
        assert errors[name] == pytest.approx(expected, rel=1e-4, abs=1e-12)
    assert errors["same"] == 0
    assert errors["none"] == pytest.approx(1, rel=1e-4)


def test_a_layer_that_one_member_has_not_seen_keeps_what_the_other_has() -> None:
    layer = Layer("layer", torch.nn.Linear(4, 2, bias=False), torch.ones(2, 4))
    batch = torch.arange(8.0).reshape(1, 2, 4)
    for parts in ([[batch], []], [[], [batch]]):
        found = merge_moments([observed(layer, part) for part in parts])
        torch.testing.assert_close(found.of("layer"), batch[0].T @ batch[0])
