"""Compare which experts two runs of a mixture choose for the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slipway.validation.parts import Routing
from slipway_validate.protocol.routes import BASE_ROUTES_FILE, ROUTES_FILE, Routes, read_routes


def compare_routes(reference: Path, run: Path) -> Routing | None:
    """Compare the choices of an output with the reference's; None unless both were recorded, for the same tokens.

    Args:
        reference: Folder of the reference's results.
        run: Folder of the output's results.
    """
    return _compare(read_routes(reference / ROUTES_FILE), _read_own(run / ROUTES_FILE))


def compare_base_routes(reference: Path) -> Routing | None:
    """Compare the choices of the base with those of base + adapter; None unless both were recorded."""
    return _compare(read_routes(reference / ROUTES_FILE), read_routes(reference / BASE_ROUTES_FILE))


def routing_notes(routing: Routing | None) -> tuple[str, ...]:
    """Return what a reader of the report is told of an output's choices."""
    return () if routing is None else (routing.said,)


def _read_own(path: Path) -> Routes | None:
    try:
        return read_routes(path)
    except (ValueError, OSError):  # a figure for people: an output is not judged by it
        return None


def _compare(theirs: Routes | None, ours: Routes | None) -> Routing | None:
    if theirs is None or ours is None or theirs.shape != ours.shape:
        return None
    layers, tokens, experts = theirs.shape
    shares = [_equal_share(*each) for each in zip(theirs, ours, strict=True)]
    lowest = int(np.argmin(shares))
    return Routing(
        layers=layers,
        tokens=tokens,
        experts=experts,
        equal=float(np.mean(shares)),
        lowest=float(shares[lowest]),
        lowest_layer=lowest,
    )


def _equal_share(theirs: Routes, ours: Routes) -> float:
    """Return the share of a layer's choices that both make. (tokens, experts of a token), sorted."""
    equal = sum(int((theirs[:, place, None] == ours).any(-1).sum()) for place in range(theirs.shape[1]))
    return equal / theirs.size
