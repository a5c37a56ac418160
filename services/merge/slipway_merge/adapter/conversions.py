"""Map names in a base's files to names in the trained model's class, with the head that only the adapter has.

The base may be stored as another class: a causal model without ``score``, a ``BertForMaskedLM`` without ``classifier``, a bare
encoder whose names lack the prefix. Tensors keep their stored names but for that prefix; those that the class does not have are
left out, and the adapter's new ones are added.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipway.errors import ModelMergeError
from slipway.model.families import FEATURE_EXTRACTION
from slipway.model.model_facts import ModelFacts
from slipway.model.pytorch.conversions import conversions
from slipway.model.safetensors_file import TensorInfo
from slipway.model.trained import TrainedModel, missing_head_error
from slipway_merge.adapter.adapter import Adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a stored tensor in a model.

    Attributes:
        name: Its stored name, with the prefix of the model's own names.
        parameter: The parameter or buffer it belongs to.
        whole: Whether it is the whole parameter; otherwise transformers joins it with others.
    """

    name: str
    parameter: str
    whole: bool


def places(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, Place]:
    """Return the places of stored tensors in a model that may be another than they were saved from; leave out those without a place."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, state = f"{model.base_model_prefix}.", model.state_dict()
    by_name: dict[str, Place] = {}
    for name in sorted(stored):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state:
            continue
        own = name
        if target.startswith(prefix) and not name.startswith(prefix):
            own = prefix + name
        elif name.startswith(prefix) and not target.startswith(prefix):
            own = name.removeprefix(prefix)
        by_name[name] = Place(own, target, whole=pattern is None)
    return by_name


@dataclass(frozen=True, slots=True)
class Headed:
    """The base's tensors under the trained class's names.

    Attributes:
        tensors: Stored tensors by output name. A new tensor of the head has the shape that the class gives it.
        new: Names of the head's tensors that the base does not have.
        dropped: Names of stored tensors that the class does not have.
    """

    tensors: dict[str, TensorInfo]
    new: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ()


def add_head(base: Mapping[str, TensorInfo], adapter: Adapter, trained: TrainedModel, facts: ModelFacts) -> Headed:
    """Return the tensors of the trained class: the base's, and the adapter's head.

    Args:
        base: Tensors of the base by stored name.
        adapter: The adapter.
        trained: The class it was trained on.
        facts: Facts about that class.

    Raises:
        ModelMergeError: ``ADAPTER_BASE_MISMATCH`` if neither base nor adapter has a weight of the class, or the base's weight
            has another shape.
    """
    current = conversions(facts.model, base).current
    saved = {current(name): tensor.info for name, tensor in adapter.whole.items()}
    candidates = places(facts.model, base)
    fitting = {name: place for name, place in candidates.items() if _fits(base[name], place, saved, facts, trained)}
    tensors = {place.name: replace(base[name], name=place.name) for name, place in fitting.items()}
    stored = {
        facts.tied.get(place.parameter, place.parameter) for place in fitting.values()
    }  # tied parameters count as their first
    new = {
        name: info for name, info in saved.items() if name in facts.shapes and facts.tied.get(name, name) not in stored
    }
    covered = stored | {facts.tied.get(name, name) for name in new}
    missing = [
        name
        for name in sorted(facts.shapes)
        if facts.tied.get(name, name) not in covered
        and not name.startswith(trained.family.unused)
        and not _is_optional(name, facts)
    ]
    if missing:
        raise (
            _no_body_error(trained, missing[0])
            if not stored
            else missing_head_error(missing[0], name=trained.name, base=trained.base)
        )
    tensors |= {name: replace(info, name=name, shape=facts.shapes[name]) for name, info in sorted(new.items())}
    return Headed(tensors, frozenset(new), tuple(sorted(base.keys() - fitting.keys())))


def _fits(
    info: TensorInfo, place: Place, saved: Mapping[str, TensorInfo], facts: ModelFacts, trained: TrainedModel
) -> bool:
    """Return whether a stored tensor has its parameter's shape; if not, the adapter must replace it."""
    expected = facts.shapes.get(place.parameter, info.shape)
    if not place.whole or info.shape == expected:
        return True
    if place.parameter in saved:  # a head for other labels
        return False
    raise ModelMergeError(
        f"the base's tensor {info.name!r} has shape {info.shape}, and a {trained.name} with the base's configuration has "
        f"{expected} there",
        reason="ADAPTER_BASE_MISMATCH",
        remedy="name the base that the adapter was trained on",
        about={"tensor": info.name, "shape": info.shape, "expected": expected},
    )


def _no_body_error(trained: TrainedModel, name: str) -> ModelMergeError:
    """Return the error for a base whose weights transformers would ignore, because the class has its body under another name."""
    return ModelMergeError(
        f"transformers takes no weight of the base, a {trained.base}, into a {trained.name}, whose names begin as {name!r}: the "
        "training began with random weights, which no file has",
        reason="ADAPTER_BASE_MISMATCH",
        remedy=f"save the base without its head once (transformers.{FEATURE_EXTRACTION.auto_class}.from_pretrained(BASE)"
        ".save_pretrained(FOLDER)), and train on that folder",
        about={"tensor": name, "class": trained.name},
    )


def _is_optional(name: str, facts: ModelFacts) -> bool:
    """Return whether the class computes a parameter that is not stored (sinusoidal positions)."""
    model = facts.model
    patterns = [*(model._keys_to_ignore_on_load_missing or []), *(model._keys_to_ignore_on_save or [])]
    return any(re.search(pattern, name) for pattern in patterns)
