"""Layers whose weights stay in the model's files, and compute with them or with rounded ones, some rows at a time.

Products with a layer's weight are exact float32 forward, and quick backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PIECE_WEIGHTS = 1 << 24
"""Weights of a layer that are in memory at once, 64 MiB in float32."""


class Rounding(Protocol):
    """A weight on a grid."""

    def rows(self, rows: slice) -> Tensor:
        """Return rows of the rounded weight, float32; gradients flow to what it is made of."""
        ...


class Weight(Protocol):
    """A weight that is read some rows at a time."""

    @property
    def pieces(self) -> tuple[slice, ...]:
        """The rows that are worked on at once."""
        ...

    def exact(self, rows: slice) -> Tensor:
        """Return rows in float32. (N, K) → (rows, K)."""
        ...


class Layer:
    """A linear layer that computes with its stored weight, or with a rounded one.

    Args:
        name: Name of its weight.
        module: The layer; its ``forward`` is replaced.
        stored: The weight, mapped from its file. (N, K)
        place: Where it is in the model, whose module may have another name than the weight; its name if it is not given.

    Attributes:
        rounding: The rounded weight; None computes with the stored one.
        observe: Called with the inputs (…, K) before each computation, if it is not None.
        differentiate: Called with the gradients of the results (…, N) when they are passed back, if it is not None; gradients then begin
            here, whatever the inputs are made of.
    """

    def __init__(self, name: str, module: torch.nn.Module, stored: Tensor, *, place: str = "") -> None:
        self.name = name
        self.place = place or name
        self.stored = stored
        self.rounding: Rounding | None = None
        self.observe: Callable[[Layer, Tensor], None] | None = None
        self.differentiate: Callable[[Layer, Tensor], None] | None = None
        self.module = module
        self.forward = module.forward = self._forward

    @property
    def pieces(self) -> tuple[slice, ...]:
        """The rows that are worked on at once."""
        count, columns = self.stored.shape
        step = max(1, PIECE_WEIGHTS // columns)
        return tuple(slice(start, min(start + step, count)) for start in range(0, count, step))

    def exact(self, rows: slice) -> Tensor:
        """Return rows of the stored weight in float32."""
        return self.stored[rows].float()

    def weight(self, rows: slice) -> Tensor:
        """Return the rows that the layer computes with."""
        return self.exact(rows) if self.rounding is None else self.rounding.rows(rows)

    def _forward(self, inputs: Tensor) -> Tensor:
        if self.observe is not None:
            self.observe(self, inputs)
        results = self._add_bias(self._product(inputs))
        if self.differentiate is not None:
            results = results + torch.zeros((), requires_grad=True)
            results.register_hook(partial(self.differentiate, self))
        return results

    def _product(self, inputs: Tensor) -> Tensor:
        pieces = self.pieces
        if len(pieces) == 1:
            return self._piece(inputs, pieces[0])
        kept = torch.is_grad_enabled()
        outputs = [
            checkpoint(self._piece, inputs, rows, use_reentrant=False) if kept else self._piece(inputs, rows)
            for rows in pieces
        ]
        return torch.cat(outputs, dim=-1)

    def _piece(self, inputs: Tensor, rows: slice) -> Tensor:
        return product(inputs, self.weight(rows))

    def _add_bias(self, results: Tensor) -> Tensor:
        bias = self.module.bias
        return results + bias if isinstance(bias, Tensor) else results


class Table:
    """An embedding that looks up rows of its stored weight, or of a rounded one.

    Args:
        module: The embedding; its ``forward`` is replaced.
        stored: The weight, mapped from its file. (N, K)
        layer: The linear layer that shares the weight, whose rounding is then used too; or None.

    Attributes:
        rounded: Whether to look up rows of the rounded weight.
        rows: Receives the rows that are looked up, which then take gradients, if it is not None.
    """

    def __init__(self, module: Any, stored: Tensor, layer: Layer | None) -> None:
        self._module = module
        self._stored = stored
        self.layer = layer
        self._original = module.forward
        self.rounded = False
        self.rows: list[Tensor] | None = None
        module.forward = self._forward

    def _forward(self, tokens: Tensor, *more: Any, **named: Any) -> Tensor:
        """Run the module's own code on a table of the rows that are needed, because it may scale them."""
        rows, places = torch.unique(tokens, return_inverse=True)
        if not self.rounded or self.layer is None or self.layer.rounding is None:
            table = self._stored[rows].float()
        else:
            table = self.layer.rounding.rows(rows)
        if self.rows is not None:
            self.rows.append(table.requires_grad_())
        module, padding = self._module, self._module.padding_idx
        stored = module._parameters.pop("weight")
        module.__dict__["weight"], module.padding_idx = table, None
        try:
            return self._original(places, *more, **named)
        finally:
            del module.__dict__["weight"]
            module._parameters["weight"], module.padding_idx = stored, padding


def walk(model: torch.nn.Module, kind: type) -> Iterator[tuple[str, Any]]:
    """Yield modules of a class with their names, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, kind):
            yield name, module


def product(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return inputs (…, K) times the transposed weight (N, K), in float32.

    Gradients are computed in bfloat16 where the processor multiplies it: they only say where to go.
    """
    made: Tensor = _Product.apply(inputs, weight)  # type: ignore[no-untyped-call]
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
