"""Repeated layers (``layer_replication``): make the model deeper with copies of the base's layers.

peft trains such a model on shared weights and cannot merge it. Written out, every copy is a separate layer with its own update.
Source: ``replicate_layers`` in ``peft/tuners/tuners_utils.py``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipway.model.adapters.adapter_config import misfit, unsupported
from slipway.model.safetensors_file import MOST_TENSORS_OF_A_MODEL, TensorInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = re.compile(r"(?P<stack>(?:.+\.)?(?:layers|encoder\.layer|h))\.(?P<number>\d+)\.(?P<rest>.+)")
#: Lists of ``config.json`` with one entry per layer.
_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")
#: Lists of numbers of layers.
_OF_LAYERS = ("mlp_only_layers",)


def source_layers(ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return for each layer of the deeper model the base layer that it copies."""
    return tuple(number for first, end in ranges for number in range(first, end))


def replicate(base: Mapping[str, TensorInfo], layers: Sequence[int]) -> dict[str, TensorInfo]:
    """Return the deeper model's tensors by name, in the base's order, each with the bytes of its original.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` for a model with several stacks, ``ADAPTER_BASE_MISMATCH`` for a layer that
            the base does not have.
    """
    matches = {name: _LAYER.fullmatch(name) for name in base}
    stacks = sorted({match["stack"] for match in matches.values() if match})
    if len(stacks) != 1:
        why = f"the base has {len(stacks)} stacks of layers ({', '.join(stacks)})"
        raise unsupported("layer_replication", list(layers), why)
    present = {int(match["number"]) for match in matches.values() if match}
    missing = sorted(set(layers) - present)
    if missing:
        what = (
            f"the adapter's layer_replication repeats layer {missing[0]}, but the base has layers 0 to {max(present)}"
        )
        raise misfit(what, key="layer_replication", layer=missing[0])
    places: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(layers):
        places[number].append(place)
    written = sum(len(places[int(match["number"])]) for match in matches.values() if match)
    if written > MOST_TENSORS_OF_A_MODEL:
        raise unsupported("layer_replication", f"{len(layers)} layers", f"they have {written} tensors in all")
    deeper: dict[str, TensorInfo] = {}
    for name, info in base.items():
        if (match := matches[name]) is None:
            deeper[name] = info
            continue
        for place in places[int(match["number"])]:
            deeper[f"{match['stack']}.{place}.{match['rest']}"] = info
    return deeper


def check_deeper(model: PreTrainedModel, written: Collection[str], layers: Sequence[int]) -> None:
    """Check that each layer of the deeper model has the kind of the layer that was copied there.

    Args:
        model: The deeper model, without weights.
        written: Names of the tensors to write.
        layers: The result of :func:`source_layers`.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` for a model whose layers differ by place.
    """
    from slipway.model.pytorch.conversions import conversions

    loaded = conversions(model, written)
    known = {name for name, _ in model.named_parameters() if _LAYER.fullmatch(name)}
    without = sorted(known - loaded.renamed.keys() - loaded.stacks.keys())
    if without:
        why = f"this model's layers differ by place, and the copied layers lack {without[0]!r}"
        raise unsupported("layer_replication", list(layers), why)


def deeper_config(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Return the configuration with the new number of layers, and with per-layer lists repeated accordingly."""
    changed = dict(config)
    before = changed.get("num_hidden_layers")
    for key in _PER_LAYER:
        value = config.get(key)
        if isinstance(value, list) and len(value) == before:
            changed[key] = [value[number] for number in layers]
    for key in _OF_LAYERS:
        if isinstance(value := config.get(key), list):
            listed = {number for number in value if isinstance(number, int)}
            changed[key] = [place for place, number in enumerate(layers) if number in listed]
    if isinstance(before, int):
        changed["num_hidden_layers"] = len(layers)
    if isinstance(changed.get("text_config"), dict):
        changed["text_config"] = deeper_config(changed["text_config"], layers)
    return changed
