"""Run graphs of PyTorch by torch alone, without transformers or the model's own classes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipway.files.json_documents import read_object_or_empty
from slipway.files.regular_file import sha256_of
from slipway.machine.processes import set_variable
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, Family
from slipway.proof.numerics import Logits
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import Bounds, LanguageModel, Past, Step, Unusable, read_config
from slipway.proof.text_models import TextReader
from slipway.validation.speed import Engine
from slipway_torchscript.params import DESCRIPTIONS, PROGRAM, SCRIPT

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MOST_PARTS, _LARGEST_AXIS = 1 << 12, 1 << 16
Run = Callable[..., Any]


class Graph:
    """A loaded graph and its description.

    Attributes:
        bounds: Largest shapes that it takes.
        inputs: Names of its inputs, in order.
        outputs: Names of its outputs, in order.
        dtype: Type in which it computes.
        cache: (heads, width) of each tensor of keys or values.
    """

    def __init__(self, run: Run, facts: dict[str, Any]) -> None:
        self._run = run
        self.inputs, self.outputs = _names(facts, "inputs"), _names(facts, "outputs")
        longest = facts.get("max_length")
        if not isinstance(longest, int) or longest < 1 or facts.get("precision") not in DTYPES:
            raise Unusable("its description names no length or no type that a graph has")
        rows = 1 if facts.get("one_row") is True else 1 << 30
        self.bounds, self.dtype, self.cache = Bounds(rows, longest, longest), DTYPES[facts["precision"]], _cache(facts)

    @torch.no_grad()
    def run(self, *inputs: Any) -> dict[str, Any]:
        """Return the outputs of one call by name."""
        try:
            results = self._run(*inputs)
        except RuntimeError as error:
            raise Unusable(f"torch cannot run it: {' '.join(str(error).split())[-500:]}") from error
        if len(results) != len(self.outputs):
            raise Unusable(f"it has {len(results)} outputs instead of {len(self.outputs)}")
        return dict(zip(self.outputs, results, strict=True))


class _GraphModel(LanguageModel):
    def __init__(self, graph: Graph, runtime: str, *, stored: str, has_cache: bool) -> None:
        self._graph, self.bounds, self.has_cache = graph, graph.bounds, has_cache
        self.native_dtype = str(graph.dtype).removeprefix("torch.")
        self.engine = Engine(
            runtime=runtime,
            version=f"torch {torch.__version__}",
            stored_dtype=stored or self.native_dtype,
            compute_dtype=self.native_dtype,
            native_dtype=self.native_dtype,
        )


class GraphDecoder(_GraphModel):
    """A decoder that takes and returns its cache; see :class:`slipway.proof.runtime.LanguageModel`."""

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        past = step.past
        if past is None:
            rows = len(step.input_ids)
            past = [torch.zeros(rows, heads, 0, width, dtype=self._graph.dtype) for heads, width in self._graph.cache]
        given = (_tensor(each) for each in (step.input_ids, step.attention_mask, step.position_ids))
        outputs = self._graph.run(*given, past)
        return outputs["logits"].float().numpy(), list(outputs["present"])


class GraphText(TextReader, _GraphModel):
    """A model that reads a whole text in one call."""

    def __init__(self, graph: Graph, runtime: str, family: Family, config: ModelConfig, *, stored: str) -> None:
        super().__init__(graph, runtime, stored=stored, has_cache=False)
        self.read_as(family, config, graph.outputs)

    def results(self, step: Step, names: tuple[str, ...]) -> list[Logits]:
        """As :meth:`slipway.proof.text_models.TextReader.results`."""
        ids, mask = _tensor(step.input_ids), _tensor(step.attention_mask)
        given = (ids, mask, torch.zeros_like(ids))[: len(self._graph.inputs)]
        outputs = self._graph.run(*given)
        return [outputs[name].float().numpy() for name in names]


def load_script(folder: Path, *, threads: int) -> LanguageModel:
    """Load ``model.pt``.

    Raises:
        Unusable: torch cannot load it, or it is not what its description says.
    """
    return _load(folder, SCRIPT, "torchscript", lambda path: torch.jit.load(path, map_location="cpu"), threads=threads)


def load_program(folder: Path, *, threads: int) -> LanguageModel:
    """Load ``model.pt2``.

    Raises:
        Unusable: torch cannot load it, or it is not what its description says.
    """
    # The archive says whether its weights are pickles. With this variable, unpickling them runs no code.
    with set_variable("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"):
        return _load(folder, PROGRAM, "torch.export", lambda path: torch.export.load(path).module(), threads=threads)


def _load(folder: Path, name: str, runtime: str, read: Callable[[str], Run], *, threads: int) -> LanguageModel:
    torch.set_num_threads(threads)
    config, family = read_config(folder)
    facts = read_object_or_empty(folder / DESCRIPTIONS[name])
    _check_digest(folder / name, facts)
    try:
        graph = Graph(read(str(folder / name)), facts)
    except (RuntimeError, ValueError, KeyError, OSError, TypeError, AssertionError, pickle.UnpicklingError) as error:
        message = " ".join(str(error).split())[:300]
        raise Unusable(f"torch cannot load {name}: {type(error).__name__}: {message}") from error
    stored = stored_dtype(folder)
    if family is DECODER:
        if graph.outputs != ("logits", "present") or not graph.cache:
            raise Unusable(f"{DESCRIPTIONS[name]} does not name the outputs of a decoder")
        return GraphDecoder(graph, runtime, stored=stored, has_cache=True)
    if not set(family.outputs) <= set(graph.outputs):
        raise Unusable(f"{DESCRIPTIONS[name]} does not name the outputs of a {family.name}")
    return GraphText(graph, runtime, family, config, stored=stored)


def _check_digest(path: Path, facts: dict[str, Any]) -> None:
    """Refuse a file that has changed since it was described."""
    files = facts.get("files")
    noted = files.get(path.name) if isinstance(files, dict) else None
    wanted = noted.get("sha256") if isinstance(noted, dict) else None
    if sha256_of(path) != wanted:
        raise Unusable(f"{path.name} is not the file that {DESCRIPTIONS[path.name]} describes, so it is not loaded")


def _names(facts: dict[str, Any], key: str) -> tuple[str, ...]:
    names = facts.get(key)
    if not isinstance(names, list) or not names or not all(isinstance(each, str) for each in names):
        raise Unusable(f"its description names no {key}")
    return tuple(names)


def _cache(facts: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    entry = facts.get("cache")
    sizes = entry if isinstance(entry, list) else []
    for size in sizes:
        if (
            not isinstance(size, list)
            or len(size) != 2
            or not all(isinstance(axis, int) and 0 < axis <= _LARGEST_AXIS for axis in size)
        ):
            raise Unusable("its description has wrong sizes of keys and values")
    if len(sizes) > _MOST_PARTS:
        raise Unusable(f"its description has {len(sizes)} keys and values")
    return tuple((heads, width) for heads, width in sizes)


def _tensor(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
