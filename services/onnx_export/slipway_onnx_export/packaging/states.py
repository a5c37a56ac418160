"""States of fixed size among a decoder's inputs, as other runtimes name them and want to be told of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import onnx_ir as ir

from slipway_onnx_export.packaging.kinds import NotPackagedError

_STATE = re.compile(r"(?:past_key_values|present)\.(\d+)\.(conv_state|recurrent_state)")

_JAVASCRIPT: Mapping[str, str] = {
    **dict.fromkeys(("lfm2", "lfm2_moe", "qwen3_next"), "recurrent"),
    **dict.fromkeys(("granitemoehybrid", "falcon_h1", "nemotron_h"), "ssm"),
}
"""What transformers.js calls a recurrent state, by type of model (``getCacheNames`` of its 4.3.1); it runs no others with states."""
_OF_PICTURES = ("qwen3_5_text", "qwen3_5_moe_text")
"""Types whose text transformers.js 4.3.1 counts by the settings of a vision part, which they do not have."""
_JAVASCRIPT_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
"""Names of kinds of layers where the state is called ``ssm``: those of transformers 4."""


def states_by_layer(names: Iterable[str]) -> dict[int, set[str]]:
    """Return the kinds of states that each layer keeps, from the names of a graph's inputs; layers without one are left out."""
    kinds: dict[int, set[str]] = {}
    for name in names:
        if part := _STATE.fullmatch(name):
            kinds.setdefault(int(part[1]), set()).add(part[2])
    return kinds


def name_states_for_javascript(graph: ir.Graph, config: Mapping[str, Any]) -> dict[str, Any]:
    """Rename a decoder's states as transformers.js does, in place; return the settings of ``config.json`` that it reads for them.

    Raises:
        NotPackagedError: transformers.js knows no states of this type of model.
    """
    if not states_by_layer(str(value.name) for value in graph.inputs):
        return {}
    model_type = str(config.get("model_type", ""))
    if model_type in _OF_PICTURES:
        raise NotPackagedError(f"transformers.js runs models of type {model_type} with their vision part only")
    if model_type not in _JAVASCRIPT:
        raise NotPackagedError(f"transformers.js knows no states of models of type {model_type}")
    called = {"conv_state": "conv", "recurrent_state": _JAVASCRIPT[model_type]}
    for values, prefix in ((graph.inputs, "past"), (graph.outputs, "present")):
        for value in values:
            if part := _STATE.fullmatch(str(value.name)):
                value.name = f"{prefix}_{called[part[2]]}.{part[1]}"
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if _JAVASCRIPT[model_type] != "ssm" or not kinds:
        return {}
    return {"layer_types": [_JAVASCRIPT_KINDS.get(str(kind), kind) for kind in kinds]}
