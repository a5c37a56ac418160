"""One graph in ONNX Runtime, on the GPU or the CPU; cache tensors stay inside the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnxruntime as ort

from slipway.files.json_documents import read_object_or_empty
from slipway.machine.onnx_runtime import ProviderChoice, open_session
from slipway.machine.processes import session_options
from slipway.model.dtypes import DTYPES, numpy_dtypes
from slipway.model.graphs.calls import FixedGraph, Promise, TooLongError, empty_part
from slipway.proof.numerics import Logits
from slipway.proof.onnx_errors import ORT_ERRORS
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import Bounds, LanguageModel, NotRunnable, Unusable
from slipway.proof.sights import Sight
from slipway.validation.speed import Engine

NUMPY_TYPES = {
    f"tensor({DTYPES[name].onnx.lower()})": dtype
    for name, dtype in numpy_dtypes("F32", "F16", "I64", "I32", "BOOL").items()
}
_ERRORS = (*ORT_ERRORS, RuntimeError)

Value = Any
"""A tensor that ONNX Runtime holds (``OrtValue``)."""


@dataclass(frozen=True, slots=True)
class _Computed:
    """A result outside of the runtime. An ``OrtValue`` made of it would lend its memory, and lose it with itself."""

    array: Any

    def numpy(self) -> Any:
        return self.array


def asked_provider(folder: Path) -> ProviderChoice:
    """Return the execution provider that the export of a folder was asked to be judged on."""
    asked = read_object_or_empty(folder / "onnx_export.json").get("provider")
    return next((choice for choice in get_args(ProviderChoice) if choice == asked), "auto")


class Graph:
    """A graph that runs on tensors by name; with the factors of an adapter in a file beside it, if there is one.

    Attributes:
        inputs: Its inputs by name.
        outputs: Names of its outputs.
        promise: The calls that a decoder takes, and the logits that it returns.

    Args:
        path: The file.
        threads: Threads that ONNX Runtime may use.
        per_token: Whether its results are one per token; those for places that a text leaves empty are then left out.
        padding: Token for such places.
        alone: Whether it is all of a model; otherwise the caller fits inputs to fixed shapes.

    Raises:
        Unusable: ONNX Runtime cannot load it, or an input has a type that is not known here.
    """

    def __init__(
        self, path: Path, *, threads: int, per_token: bool = True, padding: int = 0, alone: bool = True
    ) -> None:
        try:
            # Quantized weights need the order of the kernels; a copy of float32 ones may not fit into memory.
            self._mapped = stored_dtype(path.parent) == "float32"
            options = session_options(threads, mapped=self._mapped)
            self._opened = open_session(path, options, provider=asked_provider(path.parent))
            self._adapter, self._options = _load_adapter(path.with_suffix(".onnx_adapter"))
        except _ERRORS as error:
            raise Unusable(f"ONNX Runtime cannot load {path.parent.name}/{path.name}: {error}") from error
        self._session, self._name = self._opened.session, path.name
        self.promise = Promise.of(self._session.get_modelmeta().custom_metadata_map)
        self.inputs = {node.name: node for node in self._session.get_inputs()}
        self.outputs = [node.name for node in self._session.get_outputs()]
        shapes = {name: node.shape for name, node in self.inputs.items()}
        fixed = alone and "input_ids" in shapes and isinstance(shapes["input_ids"][1], int)
        self._fixed = FixedGraph(self._compute, shapes, per_token=per_token, padding=padding) if fixed else None
        odd = sorted(name for name, node in self.inputs.items() if node.type not in NUMPY_TYPES)
        if odd:
            raise Unusable(f"{path.name} has inputs of an unsupported type: {odd[:3]}")

    def require(self, *, inputs: set[str], outputs: set[str], known: set[str] | None = None) -> None:
        """Check the names of inputs and outputs.

        Args:
            inputs: Inputs that must be there.
            outputs: Outputs that must be there.
            known: Inputs that may be there; None for the ones that must.

        Raises:
            Unusable: A name is missing, or an input is unknown.
        """
        missing = sorted(inputs - set(self.inputs)) + sorted(outputs - set(self.outputs))
        unknown = sorted(set(self.inputs) - (inputs | (known or set())))
        if missing or unknown:
            raise Unusable(
                f"{self._name} does not have the inputs and outputs of its family: missing {missing[:3]}, unknown {unknown[:3]}"
            )
        self.outputs = [name for name in self.outputs if name in outputs]  # activations would only be copied

    def value(self, name: str, array: Any) -> Value:
        """Return an input's tensor in the type that it has in the graph."""
        wanted = NUMPY_TYPES[self.inputs[name].type]
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array, dtype=wanted))

    def empty_past(self, names: list[str], *, batch: int) -> dict[str, Value]:
        """Return what the graph keeps before the first token: no keys and values, or masked ones of a fixed length; states of zeros."""
        if self._fixed is not None:
            return {name: self.value(name, array) for name, array in self._fixed.empty_past(batch=batch).items()}
        return {name: self.value(name, empty_part(self.inputs[name].shape, batch=batch)) for name in names}

    def run(self, feed: Mapping[str, Value]) -> dict[str, Value]:
        """Run the graph; return its outputs by name.

        Raises:
            NotRunnable: A text is longer than a static graph has room for.
        """
        if self._fixed is not None:
            try:
                outputs = self._fixed.run({name: value.numpy() for name, value in feed.items()})
            except TooLongError as error:
                raise NotRunnable(f"{self._name} has fixed shapes: {error}") from error
            return {name: _Computed(value) for name, value in outputs.items()}
        return dict(
            zip(self.outputs, self._session.run_with_ort_values(self.outputs, dict(feed), self._options), strict=True)
        )

    def run_in_place(self, feed: Mapping[str, Value], places: Mapping[str, Value]) -> dict[str, Value]:
        """Run the graph with places for some of its outputs; return the others by name."""
        binding = self._session.io_binding()
        for name, value in feed.items():
            binding.bind_ortvalue_input(name, value)
        for name in self.outputs:
            if name in places:
                binding.bind_ortvalue_output(name, places[name])
            else:
                binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        pairs = zip(self.outputs, binding.get_outputs(), strict=True)
        return {name: value for name, value in pairs if name not in places}

    def _compute(self, feed: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self.outputs, self._session.run(self.outputs, feed, self._options), strict=True))

    def bounds(self, name: str = "input_ids") -> Bounds:
        """Return the largest batch: a number where the export fixed it, otherwise the axis has a name."""
        batch = self.inputs[name].shape[0]
        return Bounds(batch=batch) if isinstance(batch, int) and self._fixed is None else Bounds()

    def engine(self, output: str, *, stored: str) -> Engine:
        """Describe the runtime; it computes in the type of an output."""
        kind = next(node.type for node in self._session.get_outputs() if node.name == output)
        computed = {"tensor(float)": "float32", "tensor(float16)": "float16"}.get(kind, kind)
        return Engine(
            runtime="onnxruntime",
            version=f"onnxruntime {ort.__version__}" + (", weights mapped" if self._mapped else ""),
            provider=self._opened.provider + (f" ({self._opened.note})" if self._opened.note else ""),
            stored_dtype=stored,
            compute_dtype=computed,
            native_dtype=computed,
        )


def _load_adapter(path: Path) -> tuple[Any, Any]:
    """Load the adapter in a file; return it, and options of a run that activate it but do not keep it alive. None without the file."""
    if not path.is_file():
        return None, None
    adapter, options = ort.LoraAdapter(), ort.RunOptions()
    adapter.Load(str(path))
    options.add_active_adapter(adapter)
    return adapter, options


class GraphModel(LanguageModel):
    """A model of one or more graphs, which fix its arithmetic.

    Args:
        describe: Function that describes the runtime: a call that fails on the GPU changes what computes.
        bounds: Largest shapes.
        has_cache: Whether it takes and returns a cache.
    """

    def __init__(self, describe: Callable[[], Engine], bounds: Bounds, *, has_cache: bool) -> None:
        self._describe, self.bounds, self.has_cache = describe, bounds, has_cache
        self.native_dtype = describe().native_dtype

    @property
    def engine(self) -> Engine:  # type: ignore[override]  # others have one for good
        """Return what computes now."""
        return self._describe()

    def look(self, sight: Sight) -> Logits:  # noqa: ARG002 - graphs for pictures replace it
        """As :meth:`slipway.proof.runtime.LanguageModel.look`."""
        raise NotRunnable("it has the text part alone: set formats.onnx.parts to all for graphs of pictures too")
