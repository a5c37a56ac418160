"""Run a decoder's ``model.onnx`` with ONNX Runtime on the CPU; cache tensors stay inside the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from slipway.machine.threads import session_options
from slipway.models.dtypes import DTYPES, numpy_dtypes
from slipway.validation.speed import Engine
from slipway_validate.folders import stored_dtype
from slipway_validate.numerics import Logits
from slipway_validate.runner.model import PAST_PREFIX, PRESENT_PREFIX, Bounds, LanguageModel, Past, Step, Unusable

NUMPY_TYPES = {
    f"tensor({DTYPES[name].onnx.lower()})": dtype
    for name, dtype in numpy_dtypes("F32", "F16", "I64", "I32", "BOOL").items()
}
ORT_ERRORS: tuple[type[Exception], ...] = (
    # ONNX Runtime's own classes have no common base class but Exception.
    ort_state.Fail,
    ort_state.InvalidArgument,
    ort_state.InvalidGraph,
    ort_state.InvalidProtobuf,
    ort_state.NoModel,
    ort_state.NoSuchFile,
    ort_state.NotImplemented,
    ort_state.RuntimeException,
    RuntimeError,
)


class OnnxModel(LanguageModel):
    """A decoder graph with the usual names of inputs and outputs."""

    def __init__(self, session: ort.InferenceSession, *, stored: str) -> None:
        self._session = session
        self._inputs = {node.name: node for node in session.get_inputs()}
        self._outputs = [node.name for node in session.get_outputs()]
        self._past = [name for name in self._inputs if name.startswith(PAST_PREFIX)]
        self.has_cache = bool(self._past)
        self._check_names()
        batch = self._inputs["input_ids"].shape[0]  # a number where the export fixed it, otherwise the axis's name
        self.bounds = Bounds(batch=batch) if isinstance(batch, int) else Bounds()
        logits_type = next(node.type for node in session.get_outputs() if node.name == "logits")
        self.native_dtype = {"tensor(float)": "float32", "tensor(float16)": "float16"}.get(logits_type, logits_type)
        self.engine = Engine(
            runtime="onnxruntime",
            version=f"onnxruntime {ort.__version__}",
            provider=", ".join(session.get_providers()),
            stored_dtype=stored,
            compute_dtype=self.native_dtype,
            native_dtype=self.native_dtype,
        )

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway_validate.runner.model.LanguageModel.forward`."""
        feeds = self._past_values(step.past, batch=len(step.input_ids))
        for name, value in (
            ("input_ids", step.input_ids),
            ("attention_mask", step.attention_mask),
            ("position_ids", step.position_ids),
        ):
            if name in self._inputs:
                wanted = NUMPY_TYPES[self._inputs[name].type]
                feeds[name] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value, dtype=wanted))
        values = dict(zip(self._outputs, self._session.run_with_ort_values(self._outputs, feeds), strict=True))
        logits = values.pop("logits").numpy()
        return logits.astype(np.float32, copy=False), values if self.has_cache else None

    def _past_values(self, past: Past, *, batch: int) -> dict[str, Any]:
        if past is not None:
            return {name: past[PRESENT_PREFIX + name.removeprefix(PAST_PREFIX)] for name in self._past}
        return {name: ort.OrtValue.ortvalue_from_numpy(self._empty(name, batch)) for name in self._past}

    def _empty(self, name: str, batch: int) -> np.ndarray[Any, Any]:
        """Return an empty cache tensor: (B, heads, 0, head size)."""
        node = self._inputs[name]
        _, heads, _, size = node.shape
        return np.zeros((batch, heads, 0, size), dtype=NUMPY_TYPES[node.type])

    def _check_names(self) -> None:
        needed = [PRESENT_PREFIX + name.removeprefix(PAST_PREFIX) for name in self._past] + ["logits"]
        missing = sorted(set(needed) - set(self._outputs)) + ([] if "input_ids" in self._inputs else ["input_ids"])
        unknown = sorted(set(self._inputs) - {"input_ids", "attention_mask", "position_ids", *self._past})
        odd = sorted(name for name, node in self._inputs.items() if node.type not in NUMPY_TYPES)
        if missing or unknown or odd:
            raise Unusable(
                f"model.onnx does not have a decoder's inputs and outputs: missing {missing[:3]}, "
                f"unknown {unknown[:3]}, of an unsupported type {odd[:3]}"
            )


def load(folder: Path, *, threads: int) -> OnnxModel:
    """Load an output.

    Raises:
        Unusable: ONNX Runtime cannot load the graph, or it is not a decoder.
    """
    options = session_options(threads)
    try:
        session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    except ORT_ERRORS as error:
        raise Unusable(f"ONNX Runtime cannot load {folder.name}/model.onnx: {error}") from error
    return OnnxModel(session, stored=stored_dtype(folder))
