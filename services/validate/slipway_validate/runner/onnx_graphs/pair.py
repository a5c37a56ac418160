"""Run an encoder–decoder: ``encoder_model.onnx`` once, then ``decoder_model.onnx`` for each step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from slipway.proof.numerics import Logits
from slipway.proof.runtime import PAST_PREFIX, PRESENT_PREFIX, Past, Step
from slipway_validate.runner.onnx_graphs.session import Graph, GraphModel, Value

_MASK, _ENCODED = "encoder_attention_mask", "encoder_hidden_states"


class OnnxPair(GraphModel):
    """An encoder and a decoder; see :class:`slipway.proof.runtime.LanguageModel`.

    The encoder also gives keys and values of the cross-attention, which every step of the decoder takes. A decoder without a cache
    takes what the encoder computed from the text instead, and reads its own text again at each step.
    """

    def __init__(self, folder: Path, *, threads: int, stored: str) -> None:
        self._encoder = encoder = Graph(folder / "encoder_model.onnx", threads=threads)
        self._decoder = decoder = Graph(folder / "decoder_model.onnx", threads=threads)
        cached = [name for name in decoder.inputs if name.startswith(PAST_PREFIX)]
        self._own = [name for name in cached if ".decoder." in name]
        self._cross = [name for name in cached if ".encoder." in name]
        self._source = next((name for name in encoder.inputs if name != "attention_mask"), "input_ids")
        encoder.require(inputs={self._source}, outputs=set(map(_present, self._cross)), known={"attention_mask"})
        presents = set(map(_present, self._own))
        needed = {"input_ids"} if cached else {"input_ids", _ENCODED}
        decoder.require(inputs=needed, outputs={"logits", *presents}, known={_MASK, *self._own, *self._cross})
        super().__init__(partial(decoder.engine, "logits", stored=stored), decoder.bounds(), has_cache=bool(cached))

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        assert step.source is not None
        mask = step.source.mask
        if step.past is None:
            past = self._encode(step) | self._decoder.empty_past(self._own, batch=len(step.input_ids))
        else:
            past = step.past
        feed = {"input_ids": self._decoder.value("input_ids", step.input_ids), **past}
        if _MASK in self._decoder.inputs and mask is not None:
            feed[_MASK] = self._decoder.value(_MASK, mask)
        outputs = self._decoder.run(feed)
        logits = outputs["logits"].numpy()
        if not self.has_cache:
            return logits.astype(np.float32, copy=False), None
        return logits.astype(np.float32, copy=False), past | {name: outputs[_present(name)] for name in self._own}

    def _encode(self, step: Step) -> dict[str, Value]:
        assert step.source is not None
        feed = {self._source: self._encoder.value(self._source, step.source.values)}
        if "attention_mask" in self._encoder.inputs and step.source.mask is not None:
            feed["attention_mask"] = self._encoder.value("attention_mask", step.source.mask)
        outputs = self._encoder.run(feed)
        if not self.has_cache:
            return {_ENCODED: outputs["last_hidden_state"]}
        return {name: outputs[_present(name)] for name in self._cross}


def _present(name: str) -> str:
    """Return the output that gives the next value of a cache input."""
    return PRESENT_PREFIX + name.removeprefix(PAST_PREFIX)
