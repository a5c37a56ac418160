"""Parameters of the gguf_adapter stage."""

from __future__ import annotations

from slipway_gguf.params import NamedParams


class AdapterParams(NamedParams):
    """Parameters of the gguf_adapter stage: the names of the model and its base, as in the gguf stage."""
