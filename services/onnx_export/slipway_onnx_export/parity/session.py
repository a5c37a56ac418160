"""Run an exported graph with ONNX Runtime, whatever its shapes: without a cache, with one, or with past and present in one buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from slipway.errors import ONNXExportError
from slipway.machine.onnx_runtime import Opened, ProviderChoice, open_session
from slipway.machine.processes import session_options
from slipway.model.families import DECODER, SEQUENCE_CLASSIFIER, Family
from slipway.model.graphs.calls import FixedGraph
from slipway.proof.onnx_errors import translate_ort_errors
from slipway_onnx_export.layered.blocks import FIRST, HIDDEN, LAST, LAYER, NEXT
from slipway_onnx_export.names import IDS, MASK, POSITIONS
from slipway_onnx_export.parity.rows import Array, Session

_TEXT = (IDS, MASK, POSITIONS)
_TOKENS, _POSITIONS = "past_key_values.tokens", "past_key_values.positions"
"""Names that replace the cache of a graph without one: the tokens so far, and their positions."""

_UNUSED = 100.0
"""Value of a buffer's unused places: reading it would show in the results."""


class LayeredSession:
    """The graphs of a model in layers, as one; see :class:`slipway_onnx_export.parity.rows.Session`.

    Raises:
        ONNXExportError: As :class:`OrtSession`.
    """

    def __init__(self, folder: Path, *, threads: int, provider: ProviderChoice = "cpu") -> None:
        names = [FIRST, *sorted(path.stem for path in folder.glob(f"{LAYER}_*.onnx")), LAST]
        opened = [_load(folder / f"{name}.onnx", threads=threads, provider=provider) for name in names]
        self.opened = opened[0]
        self._graphs = [one.session for one in opened]
        inputs = {value.name: value.shape for graph in self._graphs for value in graph.get_inputs()}
        self._shapes = {name: inputs[name] for name in inputs if name in _TEXT or name.startswith("past_key_values.")}
        self._graph = FixedGraph(self._run_in_turn, self._shapes, per_token=True)

    def run(self, feed: dict[str, Array]) -> dict[str, Array]:
        """Run the graphs in turn."""
        return self._graph.run({name: value for name, value in feed.items() if name in self._shapes})

    def _run_in_turn(self, feed: dict[str, Array]) -> dict[str, Array]:
        values = dict(feed)
        for graph in self._graphs:
            outputs = [value.name for value in graph.get_outputs()]
            given = {value.name: values[value.name] for value in graph.get_inputs()}
            values.update(zip(outputs, graph.run(outputs, given), strict=True))
            if NEXT in values:
                values[HIDDEN] = values.pop(NEXT)
        return {name: value for name, value in values.items() if name == "logits" or name.startswith("present.")}

    def empty_past(self, *, batch: int) -> dict[str, Array]:
        """Return an empty cache by input name."""
        return self._graph.empty_past(batch=batch)


class OrtSession:
    """A graph in ONNX Runtime; see :class:`slipway_onnx_export.parity.rows.Session`.

    Attributes:
        opened: The session, and what it computes on.
        shapes: Axes of its inputs by name.

    Raises:
        ONNXExportError: ``EXPORT_PARITY_FAILED`` if ONNX Runtime cannot load the graph.
    """

    def __init__(
        self, path: Path, family: Family, *, threads: int, padding: int | None, provider: ProviderChoice = "cpu"
    ) -> None:
        self.opened = _load(path, threads=threads, provider=provider)
        self._session = self.opened.session
        self._outputs = [value.name for value in self._session.get_outputs()]
        self.shapes = {value.name: value.shape for value in self._session.get_inputs()}
        self._graph = FixedGraph(
            self.compute,
            self.shapes,
            per_token=family is not SEQUENCE_CLASSIFIER,
            padding=padding or 0,
        )
        cached = any(name.startswith("past_key_values.") for name in self.shapes)
        self._reads_all_again = not cached and path.stem == ("model" if family is DECODER else "decoder_model")

    @property
    def room(self) -> int | None:
        """Return how many tokens a text may have; None if that is not fixed."""
        return self._graph.room

    def run(self, feed: dict[str, Array]) -> dict[str, Array]:
        """Run the graph; inputs that it does not have are left out."""
        if not self._reads_all_again:
            return self._graph.run({name: value for name, value in feed.items() if name in self.shapes})
        new = feed["input_ids"].shape[1]
        tokens = np.concatenate([feed[_TOKENS], feed["input_ids"]], axis=1)
        whole = {**feed, "input_ids": tokens}
        if "position_ids" in feed:
            whole["position_ids"] = np.concatenate([feed[_POSITIONS], feed["position_ids"]], axis=1)
        results = self._graph.run({name: value for name, value in whole.items() if name in self.shapes})
        present = {"present.tokens": tokens, "present.positions": whole.get("position_ids", tokens)}
        return {**{name: value[..., -new:, :] for name, value in results.items()}, **present}

    def empty_past(self, *, batch: int) -> dict[str, Array]:
        """Return an empty cache by input name."""
        if self._reads_all_again:
            nothing = np.zeros((batch, 0), np.int64)
            return {_TOKENS: nothing, _POSITIONS: nothing}
        return self._graph.empty_past(batch=batch)

    def share_buffer(self, *, tokens: int) -> Session:
        """Return a session whose past and present are one buffer with room for so many tokens."""
        return SharedBufferSession(self._session, self.shapes, tokens=tokens)

    def compute(self, feed: dict[str, Array]) -> dict[str, Array]:
        """Run the graph on inputs that fit it, whatever their first axes are."""
        return dict(zip(self._outputs, self._session.run(self._outputs, feed), strict=True))


def _load(path: Path, *, threads: int, provider: ProviderChoice) -> Opened:
    def load_error(error: Exception) -> ONNXExportError:
        return ONNXExportError(
            f"onnxruntime {onnxruntime.__version__} cannot load the exported {path.name}: {error}",
            reason="EXPORT_PARITY_FAILED",
            remedy="use another engine or opset",
        )

    with translate_ort_errors(load_error):
        return open_session(path, session_options(threads, mapped=True), provider=provider)


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
        results = dict(zip(self._names, binding.get_outputs(), strict=True))
        return {name: value.numpy() for name, value in results.items() if name not in buffers} | buffers
