"""Round what an image encoder computes as llama.cpp does, which keeps it in 16 bits at every level of the text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from slipway.model.weights.parts import ModelPart, find_parts

_ACTIVATIONS = ("GELU", "Activation")
"""Parts of the names of classes whose results llama.cpp takes from a table of float16."""


def is_for_images(name: str) -> bool:
    """Return whether a weight or module of this name belongs to a part for images or sound."""
    return any(each.part is ModelPart.IMAGES_AND_SOUND for each in find_parts((name,), layers=None))


@contextmanager
def round_encoder(model: nn.Module) -> Iterator[None]:
    """Round pixels, weights of convolutions and results of activations of a model's encoder to float16, within the block.

    Source: ggml's ``ggml_im2col`` with float16, and ``ggml_vec_gelu_f32``, whose table has values of float16. Inputs of other products are
    rounded by :meth:`slipway_validate.runner.yardsticks.weights.Products.round_inputs`.
    """
    inside = [module for path, module in model.named_modules() if is_for_images(path)]
    convolutions = [each for each in inside if isinstance(each, nn.Conv2d | nn.Conv3d)]
    tables = [each for each in inside if any(part in type(each).__name__ for part in _ACTIVATIONS)]
    own = [each.weight for each in convolutions]
    hooks = [each.register_forward_pre_hook(_round_inputs) for each in (*convolutions, *tables)]
    hooks += [each.register_forward_hook(_round_result) for each in tables]
    try:
        for layer in convolutions:
            layer.weight = nn.Parameter(_half(layer.weight.detach()), requires_grad=False)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, weight in zip(convolutions, own, strict=True):
            layer.weight = weight


def _half(values: Tensor) -> Tensor:
    return values.half().to(values.dtype)


def _round_inputs(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_half(each) if isinstance(each, Tensor) and each.is_floating_point() else each for each in given)


def _round_result(_: nn.Module, given: tuple[Any, ...], result: Any) -> Any:  # noqa: ARG001 - a hook gets both
    return _half(result) if isinstance(result, Tensor) else result
