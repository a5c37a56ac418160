"""Run an IR by plain OpenVINO, with its state; only the process that validates an output imports this."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, Family
from slipway.proof.numerics import Logits
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import Bounds, LanguageModel, Past, Step, Unusable, read_config
from slipway.proof.text_models import TextReader
from slipway.validation.speed import Engine
from slipway_openvino.graphs.state import ENCODED, GIVEN
from slipway_openvino.library import error_summary, ov
from slipway_openvino.params import DECODER_MODEL, ENCODER_MODEL, MODEL, PAIRS

EXACT: Mapping[str, str] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}
"""Options for float32 arithmetic, so that the comparison judges the stored weights. By default OpenVINO rounds the cache and products' inputs."""
ROUNDED = "float32, cache and inputs in 8 bits"
"""Arithmetic when served on a processor without bfloat16. The comparison uses other arithmetic."""
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


class _Graph:
    """A compiled IR, in float32 or as it is served."""

    def __init__(self, path: Path, *, threads: int) -> None:
        self._core = ov.Core()
        self._path = path
        self._options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
        self.compile(exact=False)
        self.inputs = {port.any_name for port in self.compiled.inputs}
        self.outputs = {name for port in self.compiled.outputs for name in port.names}

    def compile(self, *, exact: bool) -> None:
        """Compile the file; release the earlier compiled model."""
        self.request: Any = None
        self.compiled: Any = None
        options = {**self._options, **(EXACT if exact else {})}
        try:
            self.compiled = self._core.compile_model(self._path, "CPU", options)
        except RuntimeError as error:  # the library raises nothing else
            raise Unusable(
                f"OpenVINO cannot load {self._path.parent.name}/{self._path.name}: {error_summary(error)}"
            ) from error
        self.request = self.compiled.create_infer_request()

    def require(self, family: Family, *, inputs: set[str], outputs: set[str]) -> None:
        """Refuse a model without these inputs and outputs.

        Raises:
            Unusable: It lacks one of them.
        """
        missing = sorted((inputs - self.inputs) | (outputs - self.outputs))
        if missing:
            raise Unusable(
                f"{self._path.name} does not have the inputs and outputs of a {family.name}: missing {missing[:3]}"
            )

    @property
    def native_dtype(self) -> str:
        """Return the serving dtype, or ROUNDED if the plugin stores a float32 cache rounded."""
        properties = {name: self.compiled.get_property(name) for name in EXACT}
        values = {
            name: value.get_type_name() if isinstance(value, ov.Type) else str(value)
            for name, value in properties.items()
        }
        kind = _DTYPES.get(values["INFERENCE_PRECISION_HINT"], values["INFERENCE_PRECISION_HINT"])
        return kind if values == EXACT or kind != "float32" else ROUNDED

    def run(self, given: Mapping[str, Any], names: tuple[str, ...]) -> list[Logits]:
        """Run the model with the values that it takes; return outputs in float32, copied out of the request."""
        self.request.infer({name: value for name, value in given.items() if name in self.inputs})
        return [np.array(self.request.get_tensor(name).data, dtype=np.float32) for name in names]


class OpenVinoModel(LanguageModel):
    """A model of one or two IRs, the last of which returns the results; see :class:`slipway.proof.runtime.LanguageModel`."""

    def __init__(self, folder: Path, *graphs: _Graph, has_cache: bool) -> None:
        self._graphs = graphs
        self.has_cache, self.bounds = has_cache, Bounds()
        self.native_dtype = graphs[-1].native_dtype
        self.engine = Engine(
            runtime="openvino",
            version=f"openvino {ov.__version__}",
            provider="CPU",
            stored_dtype=stored_dtype(folder),
            compute_dtype="float32",
            native_dtype=self.native_dtype,
        )

    def prepare_comparison(self) -> None:
        """As :meth:`slipway.proof.runtime.LanguageModel.prepare_comparison`."""
        for graph in self._graphs:
            graph.compile(exact=True)

    def leave_comparison(self) -> None:
        """As :meth:`slipway.proof.runtime.LanguageModel.leave_comparison`."""
        for graph in self._graphs:
            graph.compile(exact=False)


class _State:
    """Stands for the keys and values that a model keeps after a call; also holds the encoder's output, if there is one."""

    def __init__(self, encoded: Logits | None = None) -> None:
        self.encoded = encoded


def _require_last(past: Past, last: Past) -> Past:
    """Require that a past is the last call's, and return it: the model keeps only the last call's keys and values.

    Raises:
        Unusable: It is the past of another call.
    """
    if past is not last:
        raise Unusable("the state of these tokens was overwritten by another text")
    return past


class Decoder(OpenVinoModel):
    """A decoder that keeps its keys and values: only the next call can use a past."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        self._graph = graph = _Graph(folder / MODEL, threads=threads)
        graph.require(DECODER, inputs={"input_ids"}, outputs=set(DECODER.outputs))
        super().__init__(folder, graph, has_cache=bool(graph.request.query_state()))
        self._last: Past = None

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        if step.past is None:
            self._graph.request.reset_state()
        else:
            _require_last(step.past, self._last)
        given = {
            "input_ids": step.input_ids,
            "attention_mask": step.attention_mask,
            "position_ids": np.ascontiguousarray(step.position_ids),
            "beam_idx": np.arange(len(step.input_ids), dtype=np.int32),
        }
        (logits,) = self._graph.run(given, ("logits",))
        self._last = _State() if self.has_cache else None
        return logits, self._last


class Pair(OpenVinoModel):
    """An encoder, which runs once for a source, and a decoder that keeps its keys and values."""

    def __init__(self, folder: Path, family: Family, *, threads: int) -> None:
        self._encoder = encoder = _Graph(folder / ENCODER_MODEL, threads=threads)
        self._decoder = decoder = _Graph(folder / DECODER_MODEL, threads=threads)
        encoder.require(family, inputs=set(), outputs={ENCODED})
        decoder.require(family, inputs={"input_ids", GIVEN}, outputs=set(family.outputs))
        self._source = next((name for name in sorted(encoder.inputs) if name != "attention_mask"), "input_ids")
        super().__init__(folder, encoder, decoder, has_cache=bool(decoder.request.query_state()))
        self._last: Past = None

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`; only the next call can use a past."""
        assert step.source is not None
        mask = {} if step.source.mask is None else {"attention_mask": step.source.mask}
        if step.past is None:
            (encoded,) = self._encoder.run({self._source: step.source.values, **mask}, (ENCODED,))
            self._decoder.request.reset_state()
        else:
            encoded = _require_last(step.past, self._last).encoded
        given = {
            "input_ids": step.input_ids,
            GIVEN: encoded,
            "beam_idx": np.arange(len(step.input_ids), dtype=np.int32),
            **{f"encoder_{name}": value for name, value in mask.items()},
        }
        (logits,) = self._decoder.run(given, ("logits",))
        self._last = _State(encoded) if self.has_cache else None
        return logits, self._last


class Text(TextReader, OpenVinoModel):
    """A model that reads a whole text in one call: an encoder, or a decoder with a classification head."""

    def __init__(self, folder: Path, family: Family, config: ModelConfig, *, threads: int) -> None:
        self._graph = graph = _Graph(folder / MODEL, threads=threads)
        graph.require(family, inputs={"input_ids"}, outputs=set(family.outputs))
        super().__init__(folder, graph, has_cache=False)
        self.read_as(family, config, graph.outputs)

    def results(self, step: Step, names: tuple[str, ...]) -> list[Logits]:
        """As :meth:`slipway.proof.text_models.TextReader.results`."""
        given = {
            "input_ids": step.input_ids,
            "attention_mask": step.attention_mask,
            "token_type_ids": np.zeros_like(step.input_ids),
        }
        return self._graph.run(given, names)


def load(folder: Path, *, threads: int) -> LanguageModel:
    """Load an output.

    Raises:
        Unusable: OpenVINO cannot load it, or it is not of its model's family.
    """
    config, family = read_config(folder)
    if family is DECODER:
        return Decoder(folder, threads=threads)
    if family in PAIRS:
        return Pair(folder, family, threads=threads)
    return Text(folder, family, config, threads=threads)
