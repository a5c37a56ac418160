"""Run the graphs of a model that takes images: the encoder of pictures where there is one, the embedding, then the decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipway.model.graphs.pictures import EMBEDDING, TYPES, VISION_ENCODER, three_positions
from slipway.proof.numerics import Ints, Logits
from slipway.proof.runtime import PAST_PREFIX, PRESENT_PREFIX, Bounds, Past, Step, Unusable
from slipway.proof.sights import Sight
from slipway_validate.runner.onnx_graphs.session import Graph, GraphModel, Value

_EMBEDS, _FEATURES = "inputs_embeds", ("image_features", "deepstack_features.")


class OnnxParts(GraphModel):
    """Encoder of pictures, embedding and decoder; see :class:`slipway.proof.runtime.LanguageModel`."""

    def __init__(self, folder: Path, *, threads: int, stored: str) -> None:
        self._open_encoder = partial(Graph, folder / VISION_ENCODER, threads=threads, alone=False)
        self._encoder: Graph | None = None
        self._embedding = Graph(folder / EMBEDDING, threads=threads, alone=False)
        self._decoder = decoder = Graph(folder / "model.onnx", threads=threads, alone=False)
        self._past = [name for name in decoder.inputs if name.startswith(PAST_PREFIX)]
        self._features = {name for name in self._embedding.inputs if name.startswith(_FEATURES)}
        self._embedding.require(inputs={"input_ids", *self._features}, outputs={_EMBEDS, *self._embedding.outputs})
        presents = {PRESENT_PREFIX + name.removeprefix(PAST_PREFIX) for name in self._past}
        known = {"attention_mask", "position_ids", *TYPES, *self._embedding.outputs, *self._past}
        decoder.require(inputs={_EMBEDS}, outputs={"logits", *presents}, known=known)
        super().__init__(partial(decoder.engine, "logits", stored=stored), Bounds(), has_cache=True)

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        inputs = self._embedding.inputs
        nothing = {name: np.zeros((0, inputs[name].shape[1]), np.float32) for name in self._features}
        positions = np.repeat(step.position_ids[None], 3, axis=0) if self._counts_thrice else step.position_ids
        types = np.zeros_like(step.attention_mask)
        return self._decode(step.input_ids, nothing, (step.attention_mask, positions, types), past=step.past)

    def look(self, sight: Sight) -> Logits:
        """As :meth:`slipway.proof.runtime.LanguageModel.look`."""
        if self._encoder is None:
            self._encoder = self._open_encoder()
        encoder = self._encoder
        encoder.require(inputs=set(), outputs=self._features, known=set(sight.arguments))
        seen = encoder.run({name: encoder.value(name, sight.arguments[name]) for name in encoder.inputs})
        features = {name: value.numpy() for name, value in seen.items()}
        ids = sight.tokens[None]
        types = (ids == sight.token).astype(np.int64)
        if len({int(types.sum()), *map(len, features.values())}) != 1:
            raise Unusable(
                f"the picture has {int(types.sum())} tokens, and {VISION_ENCODER} gives other numbers of features"
            )
        mask = np.ones_like(ids)
        positions = np.arange(ids.shape[1])[None]
        if self._counts_thrice:
            positions = three_positions(ids, mask, token=sight.token, grids=_grids(sight, tokens=int(types.sum())))
        logits, _ = self._decode(ids, features, (mask, positions, types), past=None)
        return logits[0, sight.end :]

    def leave_comparison(self) -> None:
        """Free the encoder's memory: speed is measured on text."""
        self._encoder = None

    def _decode(
        self, ids: Ints, features: Mapping[str, Any], places: tuple[Ints, Ints, Ints], *, past: Past
    ) -> tuple[Logits, Past]:
        """Run embedding and decoder. ids: (B, S); places: mask (B, P + S), positions, and marks of pictures (B, P + S)."""
        mask, positions, types = places
        values = self._embed({"input_ids": ids, **features})
        given = {"attention_mask": mask, "position_ids": positions, **dict.fromkeys(TYPES, types)}
        values |= {
            name: self._decoder.value(name, array) for name, array in given.items() if name in self._decoder.inputs
        }
        if past is None:
            values |= self._decoder.empty_past(self._past, batch=len(ids))
        else:
            values |= {name: past[PRESENT_PREFIX + name.removeprefix(PAST_PREFIX)] for name in self._past}
        outputs = self._decoder.run(values)
        logits = outputs.pop("logits").numpy()
        return logits.astype(np.float32, copy=False), outputs

    def _embed(self, given: Mapping[str, Any]) -> dict[str, Value]:
        """Return the embedding's results, by the names of the decoder's inputs."""
        return self._embedding.run({name: self._embedding.value(name, array) for name, array in given.items()})

    @property
    def _counts_thrice(self) -> bool:
        """Whether the decoder counts time, rows and columns of pictures. For text, the three are equal."""
        return "position_ids" in self._decoder.inputs and len(self._decoder.inputs["position_ids"].shape) == 3


def _grids(sight: Sight, *, tokens: int) -> list[tuple[int, int]]:
    """Return the tokens of a picture down and across; each stands for a square of patches."""
    _, rows, columns = (int(each) for each in sight.arguments["image_grid_thw"][0])
    merge = math.isqrt(rows * columns // tokens)
    return [(rows // merge, columns // merge)]
