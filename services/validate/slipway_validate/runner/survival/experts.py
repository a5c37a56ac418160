"""The adapter's update of matrices that are no layer's weight: experts of a stack, and routers.

A stack is one parameter of the model. A file holds it whole, or each projection of each expert by itself; here each is a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipway.model.pytorch.conversions import Conversions
from slipway.model.pytorch.joined_updates import JoinedUpdates


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A stored matrix with an update, oriented as it is stored.

    Attributes:
        name: Its name, without ``.weight``.
        weight: The name of the stored matrix; one of a stack has the stack's name and its number.
        update: Function that returns Δ. float32
        stored: Another name that an output may have for it: the model's, where the base's files call it otherwise.
    """

    name: str
    weight: str
    update: Callable[[], Tensor]
    stored: str = ""
    tied: str = ""
    turned: bool = False

    @torch.no_grad()
    def merge(self, weight: Tensor) -> Tensor:
        """Return W + Δ in float32 for a base's weight W."""
        return weight.float() + self.update()


def adapted_parameter(
    parameter: str, layer: Any, conversions: Conversions, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[AdaptedMatrix]:
    """Yield the matrices of a parameter that has factors of its own; none if the base stores it in a shape that is not known.

    Args:
        parameter: Its name in the model.
        layer: The layer with the factors.
        conversions: How transformers loads the base.
        shapes: Shapes of the base's tensors.
    """
    if parameter in conversions.stacks:
        for expert, names in enumerate(conversions.stacks[parameter].parts):
            start = 0
            for name in names:
                rows = slice(start, start + shapes[name][0])
                yield _matrix(name, partial(_update, layer, expert, rows))
                start = rows.stop
        return
    name, shape = conversions.renamed.get(parameter, parameter), tuple(layer.get_param().shape)
    stored = shapes.get(name)
    if stored == shape and len(shape) == 2:
        update = partial(_update, layer, 0, slice(None))
        yield AdaptedMatrix(name.removesuffix(".weight"), name, update, stored=parameter)
    elif len(shape) == 3 and stored in (shape, (shape[0], shape[2], shape[1])):
        # transformers turns stacks that are stored in the second form: Qwen3-VL's as they are published.
        compute = _update if stored == shape else _turned_update
        for expert in range(shape[0]):
            yield AdaptedMatrix(f"{name}.{expert}", f"{name}.{expert}", partial(compute, layer, expert, slice(None)))


def joined_matrices(joined: JoinedUpdates) -> Iterator[AdaptedMatrix]:
    """Yield the matrices that transformers joins with others, and that have a pair of factors each."""
    for name, update in joined.updates.items():
        yield _matrix(name, update.value)


def _matrix(name: str, update: Callable[[], Tensor]) -> AdaptedMatrix:
    return AdaptedMatrix(name.removesuffix(".weight"), name, update)


def _update(layer: Any, expert: int, rows: slice) -> Tensor:
    """Return the update of some rows of one expert, oriented like the parameter."""
    [adapter] = layer.lora_A
    if layer.num_experts == 1:  # a matrix, whose factors are those of a linear layer
        left, right = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight  # (rows, r), (r, columns)
    else:
        left, right = (factors[expert] for factors in layer.get_delta_factors(adapter)[:2])
    return layer.scaling[adapter] * (left[rows].double() @ right.double()).float()


def _turned_update(layer: Any, expert: int, rows: slice) -> Tensor:
    """Return the same, transposed."""
    return _update(layer, expert, rows).T
