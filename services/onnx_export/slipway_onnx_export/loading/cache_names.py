"""Call models that name their cache ``cache_params`` (Mamba) as all other decoders are called."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, TypeVar

_PAST, _OWN = "past_key_values", "cache_params"

_Model = TypeVar("_Model")


def accept_past(model: _Model) -> _Model:
    """Let a model take and return ``past_key_values``, if it has another name for it; others stay as they are."""
    called: Any = model
    accepted = inspect.signature(called.forward).parameters
    if _OWN in accepted and _PAST not in accepted:
        called.forward = partial(_forward, called.forward, positions="position_ids" in accepted)
    return model


def _forward(
    forward: Any, *, positions: bool, past_key_values: Any = None, position_ids: Any = None, **named: Any
) -> Any:
    """Call a model's own ``forward``; one without attention has no use for positions."""
    if positions:
        named["position_ids"] = position_ids
    output = forward(**{_OWN: past_key_values}, **named)
    output.past_key_values = output.cache_params
    return output
