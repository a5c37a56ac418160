"""Measure how far rounding alone moves a model's results: in another order of sums, no two runtimes round alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SEED = 0
ROOM = 2.0
"""How many times as far as one draw of rounding errors moves a result another runtime's may: sums of a thousand products round more than once."""


@contextmanager
def rounded_otherwise(model: Any) -> Iterator[None]:
    """Let every layer's results be rounded otherwise within the block: by up to one unit in the last place of the largest of each token.

    A product's sum has rounding errors of the size of its largest terms, whatever its result is. What a model makes of them depends on the
    model: trained ones have tokens whose values are a thousand times as large as others, which most of those of random weights have not.
    """
    draw = torch.Generator().manual_seed(_SEED)
    unit = torch.finfo(torch.float32).eps

    def nudge(_module: Any, _inputs: Any, result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or result.dtype != torch.float32 or not result.dim():
            return result
        largest = result.abs().amax(-1, keepdim=True)
        return result + largest * (torch.rand(result.shape, generator=draw) * 2 - 1) * unit

    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    hooks = [module.register_forward_hook(nudge) for module in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
