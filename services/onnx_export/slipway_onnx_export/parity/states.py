"""Name the states that a graph does not carry on, where its results differ from PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from slipway.errors import ONNXExportError
from slipway.proof.onnx_errors import ORT_ERRORS
from slipway.texts import counted
from slipway_onnx_export.names import IDS, MASK, POSITIONS
from slipway_onnx_export.parity.rows import Session, past_of

_STATE = "_state"
_TOKENS = 3


def describe_lost_states(sessions: Mapping[str, Session]) -> str:
    """Return which states some tokens leave as they were; empty if all change, or if the graphs have none or do not run."""
    session = sessions.get("model")
    if session is None:
        return ""
    try:
        past = session.empty_past(batch=1)
        places = np.arange(_TOKENS)[None]
        kept = past_of(session.run({IDS: places, MASK: np.ones_like(places), POSITIONS: places, **past}))
    except (ONNXExportError, *ORT_ERRORS, KeyError, ValueError, RuntimeError):
        return ""
    states = {name: value for name, value in past.items() if name.endswith(_STATE) and name in kept}
    lost = [name for name, value in states.items() if np.array_equal(kept[name], value)]
    if not lost:
        return ""
    names = [name.replace("past_key_values.", "present.") for name in lost]
    return f"{counted(len(lost), 'state')} {'is' if len(lost) == 1 else 'are'} not carried on, first {names[0]}"
