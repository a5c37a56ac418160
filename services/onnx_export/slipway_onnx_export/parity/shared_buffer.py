"""Run a decoder's graph with past and present keys and values in one buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from slipway_onnx_export.parity.rows import Array

_UNUSED = 100.0
"""What unused places of a buffer hold: reading them would show in the results."""


class SharedBufferSession:
    """A graph that writes new keys and values into the buffer of the old ones; see :class:`slipway_onnx_export.parity.rows.Session`.

    Args:
        session: ONNX Runtime's session.
        shapes: Shapes of its inputs.
        tokens: Tokens that a buffer has room for.
    """

    def __init__(self, session: Any, shapes: Mapping[str, Sequence[Any]], *, tokens: int) -> None:
        self._session, self._shapes, self._tokens = session, shapes, tokens
        self._names = [value.name for value in session.get_outputs()]

    def empty_past(self, *, batch: int) -> dict[str, Any]:
        """Return buffers by input name, (batch, heads, tokens, head size)."""
        return {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(
                np.full((batch, shape[1], self._tokens, shape[3]), _UNUSED, np.float32)
            )
            for name, shape in self._shapes.items()
            if name.startswith("past_key_values.")
        }

    def run(self, feed: dict[str, Any]) -> dict[str, Array]:
        """Run the graph; inputs that it does not have are left out. The buffers are changed in place, and returned as the present."""
        binding = self._session.io_binding()
        buffers = {}
        for name in self._shapes:
            if name.startswith("past_key_values."):
                buffers[name.replace("past_key_values.", "present.")] = feed[name]
                binding.bind_ortvalue_input(name, feed[name])
            else:
                binding.bind_cpu_input(name, feed[name])
        for name in self._names:
            if name in buffers:
                binding.bind_ortvalue_output(name, buffers[name])
            else:
                binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        found = dict(zip(self._names, binding.get_outputs(), strict=True))
        return {name: value.numpy() for name, value in found.items() if name not in buffers} | buffers
