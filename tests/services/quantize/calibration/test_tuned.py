"""The gradients of tuned weights, against their definition; and products whose gradients are rounded."""

from __future__ import annotations

import pytest
import torch

from slipway_quantize.calibration.rounding.grid import Fitted, Grid, Piece, Tuned
from slipway_quantize.calibration.streaming.layers import product

GROUP = 16


def tuned(*, symmetric: bool, members: int = 1) -> tuple[Tuned, Fitted]:
    """A weight of two pieces, some of whose places lie beyond the grid's ends, with a group whose scale is 0."""
    random = torch.Generator().manual_seed(0)
    scales = torch.randn(6, 2, generator=random).bfloat16().float()
    scales[1, 1] = 0
    zeros = None if symmetric else torch.randint(-8, 8, (6, 2), generator=random).float()
    fitted, grid = Fitted(scales, zeros), Grid(4, GROUP, symmetric, torch.bfloat16)
    places = torch.randn(6, 2 * GROUP, generator=random) * 5
    parts = [(fitted.rows(rows), places[rows].clone()) for rows in (slice(0, 4), slice(4, 6))]
    return Tuned([Piece(grid, part, place, torch.zeros, members) for part, place in parts]), fitted


def gradients(weight: Tuned) -> tuple[torch.Tensor, torch.Tensor]:
    for piece in weight.pieces:
        piece.divide()
    found = [(piece.places.grad, piece.factors.grad) for piece in weight.pieces]
    assert all(each is not None for pair in found for each in pair)
    return torch.cat([places for places, _ in found if places is not None]), torch.cat(
        [factors for _, factors in found if factors is not None]
    )


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_the_gradient_of_a_value_is_shared_by_its_place_and_its_scale(symmetric: bool) -> None:
    weight, fitted = tuned(symmetric=symmetric)
    codes = torch.cat([piece.places.detach() for piece in weight.pieces]).round().clamp(-8, 7)
    if fitted.zeros is not None:
        codes = codes - fitted.zeros.repeat_interleave(GROUP, 1)
    scales = fitted.scales.repeat_interleave(GROUP, 1)
    share = weight.of(0)
    values = torch.cat([share.rows(slice(0, 4)), share.rows(slice(4, 6))])
    torch.testing.assert_close(values.detach(), codes * scales)
    factor = torch.arange(values.numel()).reshape(values.shape) / 100
    (values * factor).sum().backward()
    of_places, of_factors = gradients(weight)
    torch.testing.assert_close(of_places, factor * scales)
    torch.testing.assert_close(of_factors, (factor * codes * scales).reshape(6, 2, GROUP).sum(-1))


@pytest.mark.parametrize("members", [1, 2])
def test_rows_that_are_looked_up_add_their_gradients(members: int) -> None:
    """As those of an embedding, beside the head's; and as those of other windows, which another member computes."""
    weight, fitted = tuned(symmetric=True, members=members)
    one, other = weight.of(0), weight.of(members - 1)
    rows = torch.tensor([1, 3, 5])
    torch.testing.assert_close(
        one.rows(rows).detach(), torch.cat([other.rows(slice(0, 4)), other.rows(slice(4, 6))])[rows].detach()
    )
    one.rows(rows).sum().backward()
    other.rows(slice(0, 4)).sum().backward()
    of_places, _ = gradients(weight)
    times = torch.tensor([1.0, 2, 1, 2, 0, 1])[:, None]
    torch.testing.assert_close(of_places, times * fitted.scales.repeat_interleave(GROUP, 1))
    assert all(not gradient.any() for piece in weight.pieces for gradient in piece.gradients[1:])


def test_values_follow_their_places_and_scales() -> None:
    weight, fitted = tuned(symmetric=True)
    (piece, _) = weight.pieces
    with torch.no_grad():
        piece.places.fill_(2.6)
        piece.places[0].fill_(100)
        piece.factors.fill_(0.25)
    piece.update()
    assert float(piece.places.detach().max()) < 7.5
    scales = (fitted.scales[:4] * 1.25).bfloat16().float().repeat_interleave(GROUP, 1)
    torch.testing.assert_close(weight.of(0).rows(slice(0, 4)).detach()[1:], 3 * scales[1:])
    torch.testing.assert_close(weight.to_fixed(fitted, piece.grid).rows(slice(0, 1)), 7 * scales[:1])


def test_a_product_is_exact_and_its_gradients_are_near() -> None:
    random = torch.Generator().manual_seed(0)
    inputs, weight, back = (torch.randn(shape, generator=random) for shape in ((2, 24, 64), (48, 64), (2, 24, 48)))
    found = []
    for multiply in (torch.nn.functional.linear, product):
        given = inputs.clone().requires_grad_(), weight.clone().requires_grad_()
        made = multiply(*given)
        made.backward(back)
        assert given[0].grad is not None
        assert given[1].grad is not None
        found.append((made.detach(), given[0].grad, given[1].grad))
    (exact, of_inputs, of_weight), (mine, *near) = found
    torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)
    for wanted, got in zip((of_inputs, of_weight), near, strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 0.01
