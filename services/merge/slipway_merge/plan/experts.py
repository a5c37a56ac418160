"""LoRA on parameters (``target_parameters``): one low-rank product per expert of a stack, or one for a matrix such as a router's.

peft keeps the factors of all experts in two matrices: A is (experts · r, in), its rows expert by expert, and B is (out, r ·
experts), its columns rank by rank. Several parameters of one module are wrapped around each other, the first one innermost.
Source: ``ParamWrapper`` in ``peft/tuners/lora/layer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from slipway.model.adapters.adapter_config import AdapterConfig, incomplete, misfit, unsupported
from slipway.model.module_patterns import check_patterns
from slipway.model.pytorch.conversions import Stack
from slipway.model.safetensors_file import TensorInfo
from slipway_merge.adapter.adapter import ExpertPair
from slipway_merge.adapter.naming import name_in_text_model
from slipway_merge.tensors.outputs import Computed, Value
from slipway_merge.tensors.tensor_io import Array, TensorReader, read_rows, sampled_rows, share_of_rounding

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class StackedPair:
    """The factors of a parameter of shape (experts, out, in), or (experts, in, out) if ``transposed``; a matrix counts as one expert."""

    module: str
    a: TensorInfo
    b: TensorInfo
    shape: tuple[int, int, int]
    rank: int
    scaling: float
    transposed: bool

    def product(self, expert: int, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return ``scaling · B @ A`` of one expert, (out, in), for some of its output rows."""
        from slipway_merge.peft.modules import read_finite

        own = slice(expert * self.rank, (expert + 1) * self.rank)
        a = read_finite(self.a, "the adapter", (own,)).to(dtype)  # (r, in)
        b = read_finite(self.b, "the adapter", (rows, slice(expert, None, self.shape[0]))).to(dtype)  # (rows, r)
        return self.scaling * (b @ a)

    def turned(self) -> StackedPair:
        """Return the factors of the same parameter with the two axes of each expert exchanged."""
        experts, first, second = self.shape
        return replace(self, shape=(experts, second, first), transposed=not self.transposed)

    def line(self, expert: int, number: int, a: Array, b: Array) -> Array:
        """Return the update of one row of one expert, oriented like the parameter, from all factors in float64."""
        a = a[expert * self.rank : (expert + 1) * self.rank]  # (r, in)
        b = b[:, expert :: self.shape[0]]  # (out, r)
        return np.asarray(self.scaling * (b @ a[:, number] if self.transposed else b[number] @ a))


def stacked_pairs(
    pairs: Mapping[tuple[str, int], ExpertPair], config: AdapterConfig, model: PreTrainedModel
) -> dict[str, StackedPair]:
    """Return the factors by the name of their parameter in the model; the adapter may name it as the text model alone does.

    Raises:
        ModelMergeError: ``CHECKPOINT_INCOMPLETE``, ``ADAPTER_TENSOR_UNUSED`` or ``ADAPTER_BASE_MISMATCH``.
    """
    left = dict(pairs)
    modules = {module for module, _ in pairs}
    stacked: dict[str, StackedPair] = {}
    check_patterns(config.raw, (name for name, _ in model.named_parameters()))
    for module, layer in model.named_modules():
        own = module if module in modules else name_in_text_model(module)
        parameters = [name for name, _ in layer.named_parameters(recurse=False)]
        targeted = [
            name for name in parameters if any(f".{own}.{name}".endswith(f".{target}") for target in config.parameters)
        ]
        for place, parameter in enumerate(targeted):
            name = f"{own}.{parameter}"
            pair = left.pop((own, len(targeted) - 1 - place), None)
            if pair is None:
                what = f"adapter_config.json names parameter {name!r}, but the checkpoint holds no tensor for it"
                raise incomplete(what, tensor=name)
            shape = tuple(layer.get_parameter(parameter).shape)
            stacked[f"{module}.{parameter}"] = _stack_pair(
                name, pair, shape, config, transposed=bool(getattr(layer, "is_transposed", False))
            )
    if left:
        info = next(iter(left.values())).a
        what = f"the adapter has {2 * len(left)} tensors that no base weight takes, first {info.name!r} {info.shape}"
        raise misfit(what, reason="ADAPTER_TENSOR_UNUSED", tensor=info.name)
    return stacked


def _stack_pair(
    name: str, pair: ExpertPair, shape: tuple[int, ...], config: AdapterConfig, *, transposed: bool
) -> StackedPair:
    if len(shape) not in (2, 3):
        raise unsupported(
            "target_parameters", name, f"only matrices and stacks of them are merged, and its shape is {shape}"
        )
    transposed = transposed and len(shape) == 3
    experts, first, second = (1, *shape)[-3:]
    columns, rows = (first, second) if transposed else (second, first)
    rank = config.rank_of(name)
    for info, expected in ((pair.a, (experts * rank, columns)), (pair.b, (rows, experts * rank))):
        if info.shape != expected:
            what = f"adapter tensor {info.name!r} {info.shape} does not fit parameter {name!r} {shape} at rank {rank}"
            raise misfit(f"{what}, which wants {expected}", tensor=info.name, shape=info.shape, expected=expected)
    return StackedPair(name, pair.a, pair.b, (experts, first, second), rank, config.scaling_of(name), transposed)


def whole_stack(pair: StackedPair, source: TensorInfo) -> Value:
    """Return the change of a parameter that is stored as one tensor; a few experts are computed at a time."""
    if len(source.shape) == 2 and pair.shape[0] == 1:
        return one_expert(pair, 0, slice(0, pair.shape[1]), source)
    if source.shape != pair.shape and source.shape == pair.turned().shape:
        pair = pair.turned()  # transformers turns stacks that are stored so: Qwen3-VL's as they are published

    def add(weight: torch.Tensor, first: int) -> None:
        for place in range(len(weight)):
            product = pair.product(first + place, slice(None), weight.dtype)
            weight[place] += product.T if pair.transposed else product

    rows = pair.shape[1]
    value = _value(pair, source, pair.shape, lambda weight: add(weight, 0), lambda number: divmod(number, rows))
    assert value.computed is not None

    def part(dtype: np.dtype[np.floating], experts: slice) -> np.ndarray:
        from slipway_merge.peft.modules import read_widened

        weight = read_widened(source, dtype, (experts,))
        add(weight, experts.start)
        values: np.ndarray = weight.numpy()
        return values

    return replace(value, computed=replace(value.computed, part=part))


def one_expert(pair: StackedPair, expert: int, rows: slice, source: TensorInfo) -> Value:
    """Return the change of one stored tensor of a stack: some output rows of one expert."""

    def compute(weight: torch.Tensor) -> None:
        weight += pair.product(expert, rows, weight.dtype)

    return _value(
        pair, source, (rows.stop - rows.start, pair.shape[2]), compute, lambda number: (expert, rows.start + number)
    )


def places(stack: Stack, base: Mapping[str, TensorInfo]) -> list[tuple[str, int, slice]]:
    """Return every stored tensor of a stack with its expert and its rows in it."""
    parts = []
    for expert, names in enumerate(stack.parts):
        start = 0
        for name in names:
            stop = start + base[name].shape[0]
            parts.append((name, expert, slice(start, stop)))
            start = stop
    return parts


def _value(
    pair: StackedPair,
    source: TensorInfo,
    shape: tuple[int, ...],
    add: Callable[[torch.Tensor], None],
    place: Callable[[int], tuple[int, int]],
) -> Value:
    """Return a computed value: ``add`` updates the whole tensor, ``place`` returns expert and row for a row of the tensor."""
    if source.shape != shape:
        what = f"base tensor {source.name!r} is {source.shape}, but {pair.module!r} wants {shape}"
        raise misfit(what, tensor=source.name, shape=source.shape, expected=shape)

    def compute(dtype: np.dtype[np.floating]) -> np.ndarray:
        from slipway_merge.peft.modules import read_widened

        weight = read_widened(source, dtype)
        add(weight)
        values: np.ndarray = weight.numpy()
        return values

    def error(written: TensorInfo) -> float:
        numbers = sampled_rows(written)
        with TensorReader() as reader:
            a, b = reader.read(pair.a).astype(np.float64), reader.read(pair.b).astype(np.float64)
            expected = read_rows(reader, source, numbers)
            expected += np.stack([pair.line(*place(number), a, b) for number in numbers])
            return share_of_rounding(read_rows(reader, written, numbers), expected, written.dtype)

    return Value(source, computed=Computed(pair.module, "experts", compute, error, tensors=(pair.a, pair.b)))
