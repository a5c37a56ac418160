"""Classes of dense decoders beside the families of Llama, Qwen and Gemma. Data, and light."""

from __future__ import annotations

from slipway.model.decoders.kinds import DecoderClass

DENSE: tuple[DecoderClass, ...] = ()
"""Each with what its code adds to a ``config.json``."""
