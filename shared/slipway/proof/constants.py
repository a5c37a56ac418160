"""Find weights among the constants of a graph by their names.

``onnx_export`` names a constant after its PyTorch weight, with ``.T`` if it is stored (in, out), and joins layers that read the same
values as ``layers.0.q_proj+k_proj+v_proj.weight.T``. ``quantize`` adds ``.q4`` or ``.q8``, with ``.scale`` beside it, ``.i8`` with ``.i8_scale``
per output feature, or ``.fp16``. A format that is made from such a graph keeps these names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slipway.proof.stored_weights import NotUnderstoodError, Part, StoredWeight

_NAME = re.compile(r"(?P<weight>.+?)(?P<turned>\.T)?(?:\.(?:q(?P<bits>4|8)|(?P<channels>i8)|fp16))?", re.DOTALL)
_JOINED = re.compile(r"(?P<path>(?:.+\.)?)(?P<modules>[^.+]+(?:\+[^.+]+)+)\.weight", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of a weight's name.

    Attributes:
        name: Its own name in the graph.
        turned: Whether it is stored (in, out).
        bits: Bits of its integers in blocks; 0 for dense values and ``channels``.
        channels: Whether it is int8 with a scale per output feature.
        joined: Names of the weights that it holds one below the other; empty for one.
    """

    name: str
    turned: bool
    bits: int
    channels: bool
    joined: tuple[str, ...] = ()


class NamedConstants:
    """The constants of a graph that have names of weights.

    Args:
        names: Names of constants; of two for one weight, the first counts.
        rows: Function that returns the number of output features of a weight by its name; 0 if it is unknown.

    Attributes:
        names: Names of the weights.
    """

    def __init__(self, names: Iterable[str], rows: Callable[[str], int]) -> None:
        self._rows = rows
        self._constants: dict[str, Constant] = {}
        for name in names:
            self._add(name)
        self.names = frozenset(self._constants)

    def __getitem__(self, weight: str) -> Constant:
        """Return the constant that holds a weight, alone or joined with others."""
        return self._constants[weight]

    def part(self, weight: str, whole: StoredWeight) -> StoredWeight:
        """Return the rows of a constant, (N, K), that are one weight's.

        Raises:
            NotUnderstoodError: It is joined with others whose sizes are unknown, or are not those of the constant.
        """
        joined = self._constants[weight].joined
        if not joined:
            return whole
        sizes = [self._rows(part) for part in joined]
        if not all(sizes) or sum(sizes) != whole.shape[0]:
            raise NotUnderstoodError("it is joined with layers of unknown sizes")
        at = joined.index(weight)
        return Part(whole, sum(sizes[:at]), sum(sizes[: at + 1]))

    def _add(self, name: str) -> None:
        match = _NAME.fullmatch(name)
        if match is None or not match["weight"].endswith(".weight"):
            return
        bits, turned, weight = int(match["bits"] or 0), bool(match["turned"]), match["weight"]
        channels = bool(match["channels"])
        joined = _JOINED.fullmatch(weight)
        if joined is None:
            self._constants.setdefault(weight, Constant(name, turned, bits, channels))
            return
        parts = tuple(f"{joined['path']}{module}.weight" for module in joined["modules"].split("+"))
        for part in parts:
            self._constants.setdefault(part, Constant(name, turned, bits, channels, parts))
