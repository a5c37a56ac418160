"""Run a model once to learn the shapes of its results, and leave it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

_T = TypeVar("_T")
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def try_out(model: torch.nn.Module, run: Callable[[], _T]) -> _T:
    """Return the result of ``run``, which calls a model. Only shapes are computed, if the model's code allows it.

    Code that branches on computed values runs with the placeholders of the weights instead. The engines find out whether the branch matters.
    """
    with torch.no_grad(), _restore_afterwards(model):
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return run()
        except _NEEDS_VALUES:
            pass
    with torch.no_grad(), _restore_afterwards(model):
        return run()


def integers(*shape: int) -> torch.Tensor:
    """Return token ids, or a mask, of a shape."""
    return torch.ones(shape, dtype=torch.int64)


@contextmanager
def _restore_afterwards(model: torch.nn.Module) -> Iterator[None]:
    """Undo what the block assigns to a model's modules: rotary embeddings keep the angles of the last length."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
