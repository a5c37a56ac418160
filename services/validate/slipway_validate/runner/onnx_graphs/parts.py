"""Run the graphs of a model that takes images on text: the embedding, then the decoder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from slipway.model.graphs.pictures import EMBEDDING, TYPES
from slipway.proof.numerics import Logits
from slipway.proof.runtime import PAST_PREFIX, PRESENT_PREFIX, Bounds, Past, Step
from slipway_validate.runner.onnx_graphs.session import Graph, GraphModel, Value

_EMBEDS, _FEATURES = "inputs_embeds", ("image_features", "deepstack_features.")


class OnnxParts(GraphModel):
    """Embedding and decoder; see :class:`slipway.proof.runtime.LanguageModel`. There are no pictures among the text."""

    def __init__(self, folder: Path, *, threads: int, stored: str) -> None:
        self._embedding = Graph(folder / EMBEDDING, threads=threads, alone=False)
        self._decoder = decoder = Graph(folder / "model.onnx", threads=threads, alone=False)
        self._past = [name for name in decoder.inputs if name.startswith(PAST_PREFIX)]
        features = {name for name in self._embedding.inputs if name.startswith(_FEATURES)}
        self._embedding.require(inputs={"input_ids", *features}, outputs={_EMBEDS, *self._embedding.outputs})
        presents = {PRESENT_PREFIX + name.removeprefix(PAST_PREFIX) for name in self._past}
        known = {"attention_mask", "position_ids", *TYPES, *self._embedding.outputs, *self._past}
        decoder.require(inputs={_EMBEDS}, outputs={"logits", *presents}, known=known)
        super().__init__(partial(decoder.engine, "logits", stored=stored), Bounds(), has_cache=True)

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        values = self._embed(step)
        given = {"attention_mask": step.attention_mask, **dict.fromkeys(TYPES, np.zeros_like(step.attention_mask))}
        given["position_ids"] = self._positions(step)
        values |= {
            name: self._decoder.value(name, array) for name, array in given.items() if name in self._decoder.inputs
        }
        if step.past is None:
            values |= self._decoder.empty_past(self._past, batch=len(step.input_ids))
        else:
            values |= {name: step.past[PRESENT_PREFIX + name.removeprefix(PAST_PREFIX)] for name in self._past}
        outputs = self._decoder.run(values)
        logits = outputs.pop("logits").numpy()
        return logits.astype(np.float32, copy=False), outputs

    def _embed(self, step: Step) -> dict[str, Value]:
        """Return the embedding's results, by the names of the decoder's inputs."""
        inputs = self._embedding.inputs
        nothing = {name: np.zeros((0, each.shape[1])) for name, each in inputs.items() if name.startswith(_FEATURES)}
        given = {"input_ids": step.input_ids, **nothing}
        return self._embedding.run({name: self._embedding.value(name, array) for name, array in given.items()})

    def _positions(self, step: Step) -> np.ndarray:
        """Return the positions; a decoder that counts time, rows and columns of pictures gets the same three times."""
        wanted = len(self._decoder.inputs["position_ids"].shape) if "position_ids" in self._decoder.inputs else 2
        return np.repeat(step.position_ids[None], 3, axis=0) if wanted > step.position_ids.ndim else step.position_ids
