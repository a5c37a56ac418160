"""Read the experts of stacks one by one: each matrix of an expert is a tensor of its own, (out, in).

Axes: E experts, H hidden size, I width of an expert.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from slipway.errors import QuantizationError
from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights.reading import Weights
from slipway_quantize.experts import Mixture, keeps_experts
from slipway_quantize.layers.structure import LinearWeight
from slipway_quantize.levels import is_named

_DIMENSIONS = 3


@dataclass(frozen=True, slots=True)
class _Part:
    """A matrix of one expert: some of its output features in a stack."""

    stack: str
    expert: int
    rows: slice
    transposed: bool


class SplitExperts:
    """Weights whose stacks of experts are replaced by the matrices of each expert.

    Args:
        weights: The weights as they are stored, or made on the way.
        mixture: How they store experts.

    Attributes:
        tensors: As :class:`~slipway.model.weights.reading.Weights`. The place of a matrix in its file is right unless it is stored transposed.
        stacks: The stacks that are split, by name.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``: a matrix is stored by itself and in a stack.
    """

    def __init__(self, weights: Weights, mixture: Mixture) -> None:
        self._weights = weights
        self._parts: dict[str, _Part] = {}
        self.stacks: dict[str, TensorInfo] = {}
        tensors: dict[str, TensorInfo] = {}
        for name, info in weights.tensors.items():
            if not _is_stack(info, mixture):
                tensors[name] = info
                continue
            self.stacks[name] = info
            for part_name, part in _parts_of(info, mixture):
                if part_name in weights.tensors:
                    raise _experts_error(
                        f"{part_name!r} is stored by itself and in the stack {name!r}",
                        remedy="save the checkpoint again, with one of the two",
                        module=part_name.removesuffix(".weight"),
                    )
                tensors[part_name] = _place(info, part_name, part)
                self._parts[part_name] = part
        self.tensors: Mapping[str, TensorInfo] = tensors
        self._latest: tuple[tuple[str, int], NDArray[Any]] | None = None
        self._lock = threading.Lock()

    def rows(self, name: str, first: int, count: int) -> NDArray[Any]:
        """As :meth:`slipway.model.weights.reading.Weights.rows`; at most one expert is in memory if it has to be made."""
        part = self._parts.get(name)
        if part is None:
            return self._weights.rows(name, first, count)
        matrix = self._expert(part.stack, part.expert)
        matrix = (matrix.T if part.transposed else matrix)[part.rows]
        return matrix[first : first + count]

    def _expert(self, stack: str, number: int) -> NDArray[Any]:
        with self._lock:  # several threads read pieces of the same expert
            if self._latest is None or self._latest[0] != (stack, number):
                self._latest = (stack, number), self._weights.rows(stack, number, 1)[0]
            return self._latest[1]

    def close(self) -> None:
        """As :meth:`slipway.model.weights.reading.Weights.close`."""
        self._latest = None
        self._weights.close()


def _is_stack(info: TensorInfo, mixture: Mixture) -> bool:
    """Return whether a tensor has the experts of a layer; those of multi-token prediction stay, because transformers does not load them."""
    ends = (f".{mixture.gate_up}", f".{mixture.down}")
    return len(info.shape) == _DIMENSIONS and info.name.endswith(ends) and "mtp" not in info.name.split(".")


def _parts_of(info: TensorInfo, mixture: Mixture) -> Iterator[tuple[str, _Part]]:
    """Yield the names and places of the matrices in a stack, expert by expert."""
    gate, up, down = mixture.names
    gated = info.name.endswith(f".{mixture.gate_up}")
    end = mixture.gate_up if gated else mixture.down
    # ``block_sparse_moe.input_linear`` has no ``experts`` in its name, which a loader of single experts expects.
    parent = info.name.removesuffix(end) + f"{end.split('.')[0]}.experts".replace("experts.experts", "experts")
    features = info.shape[2 if mixture.transposed else 1]
    places = (
        ((gate, slice(0, features // 2)), (up, slice(features // 2, features)))
        if gated
        else ((down, slice(0, features)),)
    )
    for expert in range(info.shape[0]):
        for name, rows in places:
            yield f"{parent}.{expert}.{name}.weight", _Part(info.name, expert, rows, mixture.transposed)


def _place(info: TensorInfo, name: str, part: _Part) -> TensorInfo:
    """Describe a matrix of an expert as a tensor."""
    experts, first, second = info.shape
    columns = first if part.transposed else second
    rows = part.rows.stop - part.rows.start
    each = info.nbytes // max(1, info.numel)
    start = (
        info.start
        + part.expert * (info.nbytes // experts)
        + (0 if part.transposed else part.rows.start * columns * each)
    )
    return TensorInfo(name, info.dtype, (rows, columns), info.file, start, start + rows * columns * each)


def require_whole_experts(
    experts: Sequence[LinearWeight],
    tensors: Mapping[str, TensorInfo],
    *,
    width: int,
    keep: Collection[str],
    packed: bool,
) -> None:
    """Refuse experts of which only some could be rounded: vLLM has one scheme for a layer's experts, and transformers unpacks all or none.

    Args:
        experts: The matrices of all experts.
        tensors: The tensors of the checkpoint.
        width: The number that the input width of a layer must be a multiple of.
        keep: Names of layers that keep their type.
        packed: Whether integers are stored.

    Raises:
        QuantizationError: ``QUANTIZATION_UNSUPPORTED``.
    """
    if packed and experts:
        named = next((each.module for each in experts if is_named(each.module, keep) or keeps_experts(keep)), "")
        odd = next((each for each in experts if tensors[each.source].shape[1] % width), None)
        if named:
            raise _experts_error(
                f"keep names {named!r}, and the experts of this checkpoint, which are stored one by one, are loaded all rounded or not at all",
                remedy="name no experts in keep, or use level bf16",
                module=named,
            )
        if odd is not None:
            raise _experts_error(
                f"{odd.module!r} has an input width of {tensors[odd.source].shape[1]}, which is no multiple of the group size {width}, "
                "and experts are rounded all or not at all",
                remedy="choose a smaller group size, or a level with a scale per output feature, such as fp8",
                module=odd.module,
            )


def _experts_error(what: str, *, remedy: str, module: str) -> QuantizationError:
    return QuantizationError(what, reason="QUANTIZATION_UNSUPPORTED", remedy=remedy, about={"module": module})
