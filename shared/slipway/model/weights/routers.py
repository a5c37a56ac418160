"""Name the routers of mixtures: matrices that choose the experts of each token, which no level rounds below 16 bits."""

from __future__ import annotations

ROUTERS = (
    *("mlp.gate", "feed_forward.gate", "block_sparse_moe.gate", "mixer.gate", "moe.gate"),
    *("mlp.router", "feed_forward.router", "block_sparse_moe.router", "block_sparse_moe.router.layer"),
    *("router.proj", "router.gate"),
)
"""Ends of their modules' names in models of transformers and in checkpoints, of whole parts."""


def is_router(module: str) -> bool:
    """Return whether a module of a mixture of experts is a router, by its name."""
    named = f".{module}"
    return any(named.endswith(f".{end}") for end in ROUTERS)
