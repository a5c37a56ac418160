"""Forward methods that compute otherwise for long texts, in the place of ``Qwen3MLP.forward``: in code that torch.jit.script compiles, and not."""

from __future__ import annotations

from typing import Any

import torch


def long_texts_differ(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Double the result of more than seven tokens."""
    gated = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    if x.shape[1] > 7:
        return self.down_proj(gated) * 2.0
    return self.down_proj(gated)


def long_texts_differ_uncompiled(self: Any, x: torch.Tensor, **others: object) -> torch.Tensor:
    """Do the same; keywords of any name cannot be compiled."""
    gated = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(gated) * (2.0 if x.shape[1] > 7 else 1.0)
