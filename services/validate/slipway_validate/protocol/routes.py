"""Files of the experts that a mixture's routers choose for each token of the windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipway.proof.arrays import map_array

Routes = npt.NDArray[np.uint16]
"""Numbers of the chosen experts, (layers, tokens, experts of a token), sorted along the last axis; tokens in the order of the windows."""

ROUTES_FILE, BASE_ROUTES_FILE = "routes.npy", "base_routes.npy"
"""In the folder of a run's results, if the model is a mixture that chooses experts by number; the second with the adapter switched off."""
MOST_EXPERTS = 1 << 16
_LARGEST = 1 << 30
"""Most choices in a file; 48 layers that take 8 experts for 1,280 tokens make half a million."""
_MOST_CHOSEN = 256
"""Most experts of a token; all choices of a token are compared with each other."""


def read_routes(path: Path) -> Routes | None:
    """Map a file of choices; None if there is none.

    Raises:
        ValueError: It holds something else.
        OSError: It cannot be read.
    """
    if not path.exists():
        return None
    routes: Routes = map_array(path)
    if (
        routes.dtype != np.uint16
        or routes.ndim != 3
        or not 0 < routes.size <= _LARGEST
        or routes.shape[2] > _MOST_CHOSEN
    ):
        raise ValueError(f"{path.name} has the shape {routes.shape} and the type {routes.dtype}")
    return routes
