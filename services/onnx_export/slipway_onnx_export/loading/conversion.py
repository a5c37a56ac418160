"""Give stored weights the names and shapes that transformers gives them while loading, without reading them.

transformers renames weights of some architectures, and holds the experts of a mixture as one parameter that files store in parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Stack:
    """A weight that files store in parts: one or several matrices of each expert. Parts are joined when they are read.

    Attributes:
        parts: Matrices of each expert; their rows follow each other.
        swapped: Whether rows and columns of each expert are exchanged.
    """

    parts: tuple[tuple[torch.Tensor, ...], ...]
    swapped: bool = False

    @property
    def shape(self) -> torch.Size:
        """Return (experts, rows, columns)."""
        rows, columns = sum(len(part) for part in self.parts[0]), self.parts[0][0].shape[1]
        return torch.Size((len(self.parts), *((columns, rows) if self.swapped else (rows, columns))))

    def dim(self) -> int:
        """Return the number of axes."""
        return 3

    def numel(self) -> int:
        """Return the number of values."""
        return self.shape.numel()

    def permute(self, perm: tuple[int, ...]) -> Stack:
        """Return the stack with rows and columns of each expert exchanged."""
        assert perm == (0, 2, 1)
        return replace(self, swapped=not self.swapped)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, experts: slice) -> torch.Tensor:
        """Join the matrices of some experts."""
        joined = torch.stack([torch.cat(parts) for parts in self.parts[experts]])
        return joined.transpose(1, 2) if self.swapped else joined


Weight = torch.Tensor | Stack


def place_of(weight: Weight) -> tuple[object, ...]:
    """Return a key that two weights share if they are the same numbers in the same order: places, shape and order."""
    if isinstance(weight, Stack):
        return tuple(part.data_ptr() for parts in weight.parts for part in parts), weight.swapped
    return weight.data_ptr(), tuple(weight.shape), tuple(weight.stride())


def loaded_weights(model: Any, stored: Mapping[str, torch.Tensor]) -> dict[str, Weight]:
    """Return stored weights under their names, and under those that a transformers model gives them.

    Stacks of experts are joined lazily. The other conversions (a fused matrix that the model has in pieces) are made in memory.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    state, weights = model.state_dict(), dict[str, Weight](stored)
    if not set(state) - set(stored):
        return weights
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    gathered: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state:
            continue
        if pattern is None:
            weights.setdefault(target, stored[name])
            continue
        converter = by_pattern[pattern]
        _, parts = gathered.setdefault(target, (converter, {entry: [] for entry in converter.source_patterns}))
        parts[pattern].append(name)
    for target, (converter, parts) in gathered.items():
        weights |= _convert(model, target, converter, {key: [stored[name] for name in parts[key]] for key in parts})
    return weights


def _convert(model: Any, target: str, converter: Any, parts: Mapping[str, list[torch.Tensor]]) -> dict[str, Weight]:
    """Return the weights that a conversion makes of stored tensors, by name; none if tensors are missing."""
    if not all(parts.values()) or len({len(tensors) for tensors in parts.values()}) > 1:
        return {}
    if _stacks_experts(converter):
        experts = tuple(zip(*parts.values(), strict=True))
        shapes = {tuple(part.shape for part in matrices) for matrices in experts}
        return {target: Stack(experts)} if len(shapes) == 1 else {}
    made = deepcopy(converter)
    for pattern, tensors in parts.items():
        for tensor in tensors:
            made.add_tensor(target, target, pattern, tensor)
    return dict(made.convert(target, model=model, config=model.config))


def _stacks_experts(converter: Any) -> bool:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    return len(converter.target_patterns) == 1 and kinds in (
        [(MergeModulelist, 0)],
        [(MergeModulelist, 0), (Concatenate, 1)],
    )
