"""Say which stored tensors become which parameters when transformers loads a model.

Some architectures were renamed since their files were written (ViT), or are stored under names of their own (LLaVA); others hold several stored
tensors in one parameter (a stack of experts). transformers' conversion mapping says which. An adapter uses the model's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter made of one stored tensor per expert, or of several whose rows follow each other.

    Attributes:
        parts: Names of the stored tensors for every expert, in the order of their rows.
    """

    parts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Conversions:
    """Stored names by the model's names: ``renamed`` one to one, ``stacks`` for stacked experts.

    ``current`` returns the model's name for one of an earlier transformers, and any other name unchanged.
    """

    renamed: dict[str, str]
    stacks: dict[str, Stack]
    current: Callable[[str], str]


def conversions(model: PreTrainedModel, stored: Iterable[str]) -> Conversions:
    """Return how transformers would load these stored tensors into the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    renamed: dict[str, str] = {}
    gathered: dict[str, dict[str, list[str]]] = {}
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state:
            continue
        if pattern is None:
            renamed[target] = name
        elif _stacks_rows(by_pattern[pattern]):
            gathered.setdefault(target, {entry: [] for entry in by_pattern[pattern].source_patterns})[pattern].append(
                name
            )
    stacks = {
        target: Stack(tuple(zip(*parts.values(), strict=True)))
        for target, parts in gathered.items()
        if len({len(names) for names in parts.values()}) == 1
    }

    def current(name: str) -> str:
        return name if name in state else rename_source_key(name, renamings, [], model.base_model_prefix, state)[0]

    return Conversions(renamed, stacks, current)


def _stacks_rows(converter: Any) -> bool:
    """Return whether a converter only stacks experts and, within an expert, concatenates rows."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    operations = list(converter.operations)
    plain = [type(operation) for operation in operations] in ([MergeModulelist], [MergeModulelist, Concatenate])
    return (
        plain and len(converter.target_patterns) == 1 and [operation.dim for operation in operations] in ([0], [0, 1])
    )
