"""Find what reads a weight."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from slipway_openvino.stored.description import Layer
from slipway_openvino.stored.values import shown
from slipway_validate.runner.survival.stored import NotUnderstoodError

_PASSED_ON = frozenset({"Convert", "Reshape", "Transpose", "Squeeze", "Unsqueeze"})
"""Operations between a weight and what reads it, after which the values are the same."""
_READERS = frozenset({"MatMul", "Gather", "GatherND"})
_MOST_STEPS = 64
"""Operations between a weight and what reads it, in all places together."""


def require_readers(layers: Mapping[int, Layer], number: int) -> None:
    """Require that only products and lookups read a value: arithmetic on it would make other weights than those that are stored.

    Raises:
        NotUnderstoodError: Something else reads it.
    """
    for reader in _readers(layers, number):
        if reader.kind not in _READERS:
            raise NotUnderstoodError(f"its weight is read by {shown(reader.kind)}")


def require_few(seen: Collection[object]) -> None:
    """Refuse to go on where more steps are on the way from a weight than a writer makes.

    Raises:
        NotUnderstoodError: There are.
    """
    if len(seen) > _MOST_STEPS:
        raise NotUnderstoodError(f"more than {_MOST_STEPS} operations lie between it and what reads it")


def _readers(layers: Mapping[int, Layer], number: int) -> Iterator[Layer]:
    """Yield what reads a value, also after it got another type or shape."""
    waiting, seen = [number], {number}
    while waiting:
        for reader in layers[waiting.pop()].readers:
            if layers[reader].kind not in _PASSED_ON:
                yield layers[reader]
            elif reader not in seen:
                require_few(seen)
                seen.add(reader)
                waiting.append(reader)
