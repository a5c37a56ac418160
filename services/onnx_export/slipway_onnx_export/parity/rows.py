"""What all comparisons share: conversations, sessions, rows of tokens with padding, and how far rounding alone moves results.

In another order of sums, no two runtimes round alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_SEED = 0
ROOM = 2.0
"""Allowed difference of another runtime, in differences that one draw of rounding errors makes: sums of a thousand products round often."""


class Session(Protocol):
    """A graph that runs on arrays."""

    def run(self, feed: dict[str, Array]) -> dict[str, Array]:
        """Run the graph; inputs that it does not have are left out."""
        ...

    def empty_past(self, *, batch: int) -> dict[str, Array]:
        """Return an empty cache by input name. Each tensor: (batch, heads, 0, head size)."""
        ...


class BufferedSession(Session, Protocol):
    """A graph whose past and present may share a buffer."""

    def share_buffer(self, *, tokens: int) -> Session:
        """Return a session whose past and present are one buffer with room for so many tokens."""
        ...


class Conversation(Protocol):
    """One or several calls that are compared; both sides give one array per call, without padding."""

    @property
    def name(self) -> str:
        """Return its name in messages."""
        ...

    @property
    def calls(self) -> int:
        """Return the number of calls."""
        ...

    def prepare(self, model: Any) -> None:
        """Learn from transformers' model what :meth:`run_reference` needs, before calls of the model are recorded."""
        ...

    def run_reference(self, model: Any) -> Iterator[Array]:
        """Run transformers' model."""
        ...

    def run_exported(self, sessions: Mapping[str, Session]) -> Iterator[Array]:
        """Run the graphs, by their names."""
        ...


def past_of(results: Mapping[str, Array]) -> dict[str, Array]:
    """Return the cache that a call returned, as inputs of the next."""
    return {
        name.replace("present.", "past_key_values."): value
        for name, value in results.items()
        if name.startswith("present.")
    }


def random_rows(
    random: np.random.Generator, *, vocabulary: int, pads: tuple[int, ...], length: int, side: str, padding: int | None
) -> tuple[Array, Array]:
    """Make rows of random tokens with padding on a side: ids and mask, both (len(pads), length).

    Padding has the model's padding token, and no other place has it: some models find padding by its token.
    """
    ids = random.integers(0, vocabulary, size=(len(pads), length), dtype=np.int64)
    columns = np.arange(length)[None, :]
    counts = np.array(pads)[:, None]
    mask = (columns >= counts if side == "left" else columns < length - counts).astype(np.int64)
    if padding is not None:
        ids = np.where(ids == padding, (ids + 1) % vocabulary, ids)
        ids = np.where(mask == 0, padding, ids)
    return ids, mask


@contextmanager
def perturb_rounding(model: Any) -> Iterator[None]:
    """Perturb every layer's results within the block, by up to one unit in the last place of each token's largest value.

    A sum of products has rounding errors of the size of its largest terms, whatever its result is. Their effect depends on the model:
    trained models have tokens whose values are a thousand times as large as others; most models of random weights have none.
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
