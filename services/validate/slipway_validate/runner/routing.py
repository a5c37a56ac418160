"""Record which experts the routers of a mixture choose while it computes.

In transformers, a layer's router hands the numbers of the chosen experts to the module that holds the experts. So they are read
where they arrive, whatever rule chose them (softmax, sigmoid, groups, biases).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from slipway.proof.numerics import Ints
from slipway_validate.protocol.routes import MOST_EXPERTS, Routes

_ARGUMENTS = ("top_k_index", "router_indices")
"""Names of the argument of an experts' module. Source: transformers 5.23; the second is gpt-oss's."""

_RECORDED: ContextVar[object] = ContextVar("recorded", default=None)
"""What the present calls are recorded for: calls of several jobs may go through a model together."""


@contextmanager
def record_routes(model: Any, path: Path) -> Iterator[None]:
    """Write the choices of all that the model computes in this context to a file; write none for a model that makes none.

    Args:
        model: A runtime's model; only those that compute with a PyTorch module are looked into.
        path: The file, as :func:`slipway_validate.protocol.routes.read_routes` reads it.
    """
    module: Any = getattr(model, "module", None)
    chosen: dict[str, list[Ints]] = {}
    hooks = []
    before = _RECORDED.set(chosen)
    for name, part in module.named_modules() if hasattr(module, "named_modules") else ():
        accepted = list(inspect.signature(type(part).forward).parameters)
        argument = next((each for each in _ARGUMENTS if each in accepted), None)
        if argument is not None:
            record = _recorder(chosen, name, argument, accepted.index(argument) - 1)
            hooks.append(part.register_forward_pre_hook(record, with_kwargs=True))
    try:
        yield
    finally:
        _RECORDED.reset(before)
        for hook in hooks:
            hook.remove()
    routes = _join([parts for parts in chosen.values() if parts])
    if routes is not None:
        np.save(path, routes)


def _recorder(chosen: dict[str, list[Ints]], name: str, argument: str, position: int) -> Any:
    from torch import Tensor  # the process of another runtime does not have it in memory

    parts = chosen.setdefault(name, [])

    def record(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        index = named.get(argument, given[position] if position < len(given) else None)
        if _RECORDED.get() is chosen and isinstance(index, Tensor) and not index.is_floating_point():
            parts.append(index.detach().reshape(-1, index.shape[-1]).numpy().astype(np.int64))

    return record


def _join(layers: list[list[Ints]]) -> Routes | None:
    """Return the choices of all layers, sorted; None if there are none, or if layers differ in tokens or in experts of a token."""
    if not layers or any(len({part.shape[1] for part in parts}) > 1 for parts in layers):
        return None
    joined = [np.concatenate(parts) for parts in layers]
    if len({each.shape for each in joined}) > 1 or max(int(each.max(initial=0)) for each in joined) >= MOST_EXPERTS:
        return None
    routes: Routes = np.sort(np.stack(joined), axis=-1).astype(np.uint16)
    return routes if routes.size else None
