"""Put functions that can be traced in the place of those of transformers that cannot, while a model is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from slipway_onnx_export.forms.recurrence import RECURRENCES
from slipway_onnx_export.forms.rotary import COMPLEX, turning, use_real_angles

_ROTATE = "apply_rotary_emb"


@contextmanager
def traceable(model: Any) -> Iterator[None]:
    """Replace functions in the modules of a model's classes while the block runs; other models must not run meanwhile."""
    sources = {sys.modules[type(module).__module__] for module in model.modules()}
    with ExitStack() as stack:
        for source in sources:
            for name, function in _replacements(source).items():
                stack.callback(partial(setattr, source, name, getattr(source, name)))
                setattr(source, name, function)
        for module in model.modules():
            if _axis(sys.modules[type(module).__module__]) and type(module).__name__.endswith("RotaryEmbedding"):
                stack.callback(use_real_angles(module))
        yield


def _replacements(source: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the functions for a module of transformers, by name."""
    recurrences = {name: function for name, function in RECURRENCES.items() if hasattr(source, name)}
    axis = _axis(source)
    return {**recurrences, _ROTATE: turning(axis)} if axis else recurrences


def _axis(source: ModuleType) -> int:
    """Return the axis of heads where a module multiplies complex numbers; 0 for any other."""
    return COMPLEX.get(str(source.__package__).rpartition(".")[2], 0) if hasattr(source, _ROTATE) else 0
