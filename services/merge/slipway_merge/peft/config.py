"""Read an adapter's configuration with peft, and recognise the tensors of its form."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import peft
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

from slipway.model.adapters.adapter_config import UNMERGED_REMEDY, unsupported
from slipway.model.model_files import ADAPTER_PREFIX
from slipway_merge.peft.modules import run_peft


def peft_config(raw: Mapping[str, Any]) -> peft.PeftConfig:
    """Return the adapter's configuration as peft's own class.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` for an option that peft does not know, or a form without a merge.
    """
    types = {kind.value: kind for kind in PEFT_TYPE_TO_TUNER_MAPPING}
    kind = types.get(str(raw.get("peft_type")))
    if kind is None:
        raise unsupported("peft_type", raw.get("peft_type"), f"peft {peft.__version__} does not know it")
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[kind]
    if not _merges(tuner):
        why = "it changes the model's input or its computation, and no weight that could be written"
        raise unsupported("peft_type", kind.value, why, remedy=UNMERGED_REMEDY)
    known = {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])}
    for key in sorted(set(raw) - known):
        if raw[key]:
            raise unsupported(key, raw[key], f"peft {peft.__version__} does not know this option of {kind.value}")
    with run_peft("adapter_config.json"):
        return peft.PeftConfig.from_peft_type(**{key: copy.deepcopy(raw[key]) for key in sorted(set(raw) & known)})


def _merges(tuner: type) -> bool:
    """Return whether a method of peft has layers that implement a merge."""
    if not issubclass(tuner, BaseTuner) or not hasattr(tuner, "tuner_layer_cls"):
        return False
    layers = [tuner.tuner_layer_cls]
    for layer in layers:
        layers += layer.__subclasses__()
    return any(layer.merge is not BaseTunerLayer.merge for layer in layers)


def is_peft_tensor(key: str, raw: Mapping[str, Any]) -> bool:
    """Return whether an adapter tensor belongs to the form, and not to a module or bias saved along."""
    kinds = {kind.value: prefix for kind, prefix in PEFT_TYPE_TO_PREFIX_MAPPING.items()}
    prefix = kinds.get(str(raw.get("peft_type"))) or "?"
    parts = key.removeprefix(ADAPTER_PREFIX).split(".")
    return not key.startswith(ADAPTER_PREFIX) or any(part.startswith(prefix) for part in parts)
