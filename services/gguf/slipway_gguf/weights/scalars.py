"""Take single values out of a model's tensors for the metadata, where llama.cpp reads settings that a model trains."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import gguf

from slipway.model.safetensors_file import TensorInfo
from slipway.model.weights.reading import mapped
from slipway_gguf.metadata import Field, Parameters
from slipway_gguf.weights.completeness import tensor_error

_LAYER = re.compile(r"^(?:\w+\.)+?layers\.(\d+)\.(.+)$")


def take_scalars(
    tensors: Mapping[str, TensorInfo], parameters: Parameters
) -> tuple[tuple[Field, ...], dict[str, TensorInfo]]:
    """Return a list by layer for each key that comes from tensors, and the tensors that are left.

    Raises:
        GGUFExportError: ``GGUF_INVALID`` for a layer without such a tensor, or one with several values; ``NON_FINITE_WEIGHTS``.
    """
    keys, left = parameters.architecture.scalars, dict(tensors)
    values: dict[str, dict[int, float]] = {key: {} for key in keys.values()}
    for name in tensors:
        layer = _LAYER.match(name)
        if layer and layer[2] in keys:
            values[keys[layer[2]]][int(layer[1])] = _only_value(name, left.pop(name))
    numbers = range(parameters.decoder.layers)
    for end, key in keys.items():
        if {*values[key]} != {*numbers}:
            lacking = min({*numbers} ^ {*values[key]})
            raise tensor_error(f"the model has {end!r} in other layers than all {len(numbers)}, first {lacking}", end)
    kind, item = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT32
    fields = (Field(key, tuple(each[layer] for layer in numbers), kind, item) for key, each in values.items())
    return tuple(fields), left


def _only_value(name: str, info: TensorInfo) -> float:
    if info.numel != 1:
        raise tensor_error(f"tensor {name!r} has the shape {info.shape}, and not one value", name)
    value = float(mapped(info).reshape(-1)[0])
    if not math.isfinite(value):
        raise tensor_error(f"weight {name!r} is {value}", name, reason="NON_FINITE_WEIGHTS")
    return value
