"""Decide how the comparison passes a model's attention window, which exporters drop silently."""

from __future__ import annotations

from dataclasses import dataclass

from slipway.model.families import DECODER
from slipway.sizes import format_size
from slipway_onnx_export.parity.made_up_past import EDGE
from slipway_onnx_export.source import WINDOW_LIMIT, ModelSource

BEYOND = 4
"""Tokens by which a text is longer than the window."""

NEW = (3, 1)
"""New tokens of the calls after a made-up past. The first of them does not see ``EDGE - sum(NEW)`` of its tokens, the last none of the edge."""

_MOST, _SMALL = 8, 64 << 20
"""A made-up past takes up to this part of the weights' size, or so many bytes."""

_COPIES = 4
"""How often it is in memory: as what a graph takes, what it returns, what ONNX Runtime keeps of that, and what attention makes of it."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the comparison reaches.

    Attributes:
        window: Tokens that local layers attend to, 0 if all attention is full.
        text: Whether a text beyond the window is compared.
        past: Tokens of a made-up past that is compared instead of a text; 0 for none.
        why: Why nothing beyond the window is compared; otherwise empty.
        matters: Whether a graph could be wrong there: a text can be longer than the window.
    """

    window: int
    text: bool = False
    past: int = 0
    why: str = ""
    matters: bool = True

    @property
    def record(self) -> str:
        """Describe it for ``onnx_export.json``."""
        return f"not compared: {self.why}" if self.why else "compared"


def reach_of(
    source: ModelSource, *, room: int, cached: bool = True, shared: bool = False, spare_bytes: int = 4 << 30
) -> Reach:
    """Return how the comparison passes the model's window.

    Args:
        source: The model.
        room: Tokens that a text may have in the model and its graphs.
        cached: Whether the graphs have a cache.
        shared: Whether past and present are one buffer.
        spare_bytes: Memory that the comparison of short texts leaves.
    """
    window = source.sliding_window
    if not window:
        return Reach(0)
    if room <= window:
        return Reach(window, why=f"no text of {room} tokens at most is beyond {window}", matters=False)
    text = window <= WINDOW_LIMIT
    past = 0 if text else window + EDGE - sum(NEW)
    why = ""
    if not text and (source.family is not DECODER or not cached or shared):
        why = f"a text beyond the window of {window} tokens would take too long"
    elif room < (window + BEYOND + 1 if text else past + sum(NEW)):
        why = f"there is room for {room} tokens, too few to pass the window of {window}"
    elif past:
        needed = _cache_bytes(source, tokens=past)
        most = max(0, min(max(source.fp32_bytes // _MOST, _SMALL), spare_bytes // _COPIES))
        if needed > most:
            what = f"{format_size(needed)} for keys and values of the window of {window} tokens"
            why = f"{what}, more than the {format_size(most)} that this comparison may take"
    return Reach(window, why=why) if why else Reach(window, text=text, past=past)


def _cache_bytes(source: ModelSource, *, tokens: int) -> int:
    config = source.text_config
    heads = int(config.num_attention_heads)
    cached = int(getattr(config, "num_key_value_heads", None) or heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * 4 * source.layers * cached * size * tokens
