"""Products of a layer's inputs with its weight: exact float32 forward, quick backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def product(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return inputs (…, K) times the transposed weight (N, K), in float32.

    Gradients are computed in bfloat16 where the processor multiplies it: they only say where to go.
    """
    made: Tensor = _Product.apply(inputs, weight)
    return made


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return multiply(inputs, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs, weight = ctx.saved_tensors
        rows = gradients[0].reshape(-1, weight.shape[0]).to(_GRADIENTS)  # (positions, N)
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = (rows @ weight.to(_GRADIENTS)).float().view(inputs.shape)
        if ctx.needs_input_grad[1]:
            of_weight = (rows.T @ inputs.reshape(-1, weight.shape[1]).to(_GRADIENTS)).float()
        return of_inputs, of_weight


def multiply(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return inputs (…, K) times the transposed weight (N, K).

    oneDNN computes it where torch has it: MKL, its first choice, is half as fast on processors of AMD.
    """
    if torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(inputs, weight, None, "none", [], "")
    return torch.nn.functional.linear(inputs, weight)


def _gradient_type() -> torch.dtype:
    has: Mapping[str, Any] = torch.cpu.get_capabilities()
    return torch.bfloat16 if has.get("avx512_bf16") or has.get("amx_bf16") else torch.float32


_GRADIENTS = _gradient_type()
