"""Find out by computing it whether a decoder's attention mask hides padding, later tokens and those before a window, and nothing else."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime

from slipway_onnx_export.names import IDS, MASK
from slipway_onnx_export.parity.ort_errors import ORT_ERRORS
from slipway_onnx_export.parity.rows import Array
from slipway_onnx_export.source import WINDOW_LIMIT

_FAR = 2 * WINDOW_LIMIT
"""Tokens of the longest sample: beyond each window that engines build."""

_SAMPLES = (
    (3, [[1, 1, 1], [1, 0, 0]]),
    (1, [[1, 1, 1, 1, 1], [1, 1, 0, 0, 1]]),
    (2, [[1] * _FAR]),
)
"""New tokens, and the mask of all tokens: a prompt, a token after it, and tokens far from the first."""

_HIDDEN = -1000.0
"""What is added to scores of hidden tokens is below this."""


def window_of(graph: ir.Graph, mask: ir.Value, *, causal: bool, window: int) -> int | None:
    """Return the sliding window of a mask that hides padding and later tokens too: 0 for none, None if the mask does anything else.

    Args:
        graph: The decoder.
        mask: Its mask, bool (True is visible) or float (added to scores), (batch, 1, new, total).
        causal: Whether the operator that reads it hides later tokens itself.
        window: The window of the model's local layers; 0 for none.
    """
    inputs = [value for value in graph.inputs if value.name in (IDS, MASK)]
    try:
        part = ir.convenience.extract(graph, inputs, [mask])
        if any(value.const_value is None for value in part.initializers.values()):
            return None
        model = ir.serde.serialize_model(ir.Model(part, ir_version=10)).SerializeToString()
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        return next((size for size in sorted({0, window}) if _hides(session, size, causal=causal)), None)
    except (ValueError, *ORT_ERRORS):  # it depends on more than the tokens' places
        return None


def _hides(session: onnxruntime.InferenceSession, window: int, *, causal: bool) -> bool:
    return all(_as_expected(session, new, np.array(rows), window, causal=causal) for new, rows in _SAMPLES)


def _as_expected(session: onnxruntime.InferenceSession, new: int, mask: Array, window: int, *, causal: bool) -> bool:
    rows, total = mask.shape
    feed = {IDS: np.zeros((rows, new), np.int64), MASK: mask}
    taken = {value.name for value in session.get_inputs()}
    (found,) = session.run(None, {name: value for name, value in feed.items() if name in taken})
    seen = found if found.dtype == bool else found > _HIDDEN
    if found.dtype != bool and np.any(found[seen]):
        return False
    keys, queries = np.arange(total)[None, :], np.arange(total - new, total)[:, None]
    earlier = keys <= queries  # (new, total)
    shown = np.broadcast_to(seen & earlier if causal else seen, (rows, 1, new, total))[:, 0]
    if window:
        earlier &= keys > queries - window
    real = mask[:, -new:].astype(bool)  # what padding sees is of no interest
    return bool(np.array_equal(shown[real], (earlier & mask[:, None, :].astype(bool))[real]))
