"""What all comparisons share: conversations, sessions, and rows of tokens with padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


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

    def sharing(self, *, tokens: int) -> Session:
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
        """Ask transformers' model for what :meth:`reference` needs, before calls of the model are recorded."""
        ...

    def reference(self, model: Any) -> Iterator[Array]:
        """Run transformers' model."""
        ...

    def exported(self, sessions: Mapping[str, Session]) -> Iterator[Array]:
        """Run the graphs, by their names."""
        ...


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
