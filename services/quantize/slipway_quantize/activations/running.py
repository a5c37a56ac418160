"""Run graphs on windows of text, one at a time, with further results."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slipway.errors import QuantizationError
from slipway.machine.processes import session_options
from slipway.model.families import Comparison, Family
from slipway.model.folder import ModelFolder
from slipway.model.graphs.calls import empty_part
from slipway.stage import Context
from slipway.texts import quoted
from slipway_quantize.calibration.windows import read_windows
from slipway_quantize.graphs.folder import DataFile, Shared, copy_external, graph_files, load_graph, save_graph
from slipway_quantize.graphs.left_out import LeftOutSource

_STATES = (".conv_state", ".recurrent_state")
_MOST_VALUES = 1 << 24
"""Most values of a state of one row: a graph of others must not ask for all memory."""
_DATA = "session.model_external_initializers_file_folder_path"

Array = NDArray[Any]
WINDOWS, WINDOW_TOKENS = 128, 128
"""An eighth of them judges; more text moves the ranges of the trained sample by less than a step."""


@contextmanager
def complete(source: Path, left_out: LeftOutSource, ctx: Context) -> Iterator[Path]:
    """Yield a folder with the only graph of ``source`` and all its weights; if it is a copy, remove it afterwards.

    Raises:
        QuantizationError: ``CALIBRATION_UNSUPPORTED``: there are several graphs.
    """
    names = graph_files(source)
    if len(names) != 1:
        raise unsupported_error(f"it has {len(names)} graphs, which pass values to each other")
    model = load_graph(source, names[0])
    if not left_out.put_in(model, names[0]):
        yield source
        return
    folder = ctx.workdir / "complete"
    folder.mkdir()
    try:
        with DataFile(folder, names[0], Shared()) as data:
            copy_external(source, model, data)
        save_graph(model, folder, names[0])
        yield folder
    finally:
        shutil.rmtree(folder)


class TextGraph:
    """The graph of a folder, run without fusion and without packed copies of its weights.

    Args:
        model: The graph, which may have been changed.
        folder: Folder with its data.
        ctx: Context of the stage.

    Raises:
        QuantizationError: ``QUANTIZATION_FAILED``.
    """

    def __init__(self, model: ir.Model, folder: Path, ctx: Context) -> None:
        import onnxruntime as ort

        options = session_options(ctx.threads)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        # The usual order dequantizes all weights first, and frees none before its product runs.
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry(_DATA, str(folder.resolve()))
        with _run_errors():
            stored = ir.to_proto(model).SerializeToString()
            self._session = ort.InferenceSession(stored, options, providers=["CPUExecutionProvider"])

    @property
    def inputs(self) -> list[Any]:
        """Return the names, types and shapes of its inputs."""
        return list(self._session.get_inputs())

    def compute(self, wanted: Iterable[str], given: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Return results by name.

        Raises:
            QuantizationError: ``QUANTIZATION_FAILED``.
        """
        names = list(wanted)
        if not names:  # ONNX Runtime would return all results
            return {}
        with _run_errors():
            results = self._session.run(names, dict(given))
        return dict(zip(names, results, strict=True))


@contextmanager
def _run_errors() -> Iterator[None]:
    """Give errors of ONNX Runtime their reason."""
    try:
        yield
    except Exception as error:  # ONNX Runtime raises many classes without a common base
        raise QuantizationError(
            f"ONNX Runtime cannot run the model on the calibration text: {' '.join(str(error).split())[:500]}",
            reason="QUANTIZATION_FAILED",
            remedy="export the ONNX model again, or use level int8, which needs no text",
            about={"loader": "ONNX Runtime"},
        ) from error


class Text:
    """Windows of the calibration text for one model.

    Args:
        data: Folder with ``calibration.jsonl``.
        model: The model, with its tokenizer.
        seed: Seed of the choice.
        windows: Most windows.

    Attributes:
        family: The model's family.
        fit: Windows to find ranges with. (tokens,) each
        held_out: Windows to judge by.
        digest: SHA-256 of the text.

    Raises:
        QuantizationError: ``CALIBRATION_DATA_INVALID``; ``CALIBRATION_UNSUPPORTED``: text alone is no input of such a model.
    """

    def __init__(self, data: Path, model: ModelFolder, *, seed: int = 0, windows: int = WINDOWS) -> None:
        config, family = model.config, model.family
        if family is None or family.comparison is Comparison.TEACHER_FORCED:
            raise unsupported_error(f"what a {config.description} computes on plain text is unknown")
        vocabulary = config.get("vocab_size")
        if not isinstance(vocabulary, int) or isinstance(vocabulary, bool):
            raise unsupported_error(f"config.json of this {config.description} has no vocab_size")
        cut = read_windows(data, model, count=windows, length=WINDOW_TOKENS, vocabulary=vocabulary, seed=seed)
        self.family: Family = family
        self.fit: Sequence[Array] = [window.numpy() for window in cut.fit]
        self.held_out: Sequence[Array] = [window.numpy() for window in cut.held_out]
        self.digest = cut.digest


def feeds(inputs: Sequence[Any], window: Array) -> dict[str, Array]:
    """Return values for a graph's inputs: one window with an empty cache.

    Raises:
        QuantizationError: ``CALIBRATION_UNSUPPORTED``: the graph has another input, or fixed lengths.
    """
    tokens = window[None].astype(np.int64)  # (1, tokens)
    known = {
        "input_ids": tokens,
        "attention_mask": np.ones_like(tokens),
        "position_ids": np.arange(tokens.shape[1], dtype=np.int64)[None],
        "token_type_ids": np.zeros_like(tokens),
    }
    made: dict[str, Array] = {}
    for wanted in inputs:
        shape = [int(size) if isinstance(size, int) else None for size in wanted.shape]
        if wanted.name in known and len(shape) == 2 and shape[1] in {None, tokens.shape[1]}:
            made[wanted.name] = np.repeat(known[wanted.name], shape[0] or 1, axis=0)
        elif wanted.name.startswith("past_key_values.") and _begins_empty(wanted.name, shape):
            part = empty_part(shape, batch=shape[0] or 1)
            made[wanted.name] = part.astype(np.float16) if "float16" in wanted.type else part
        else:
            raise unsupported_error(
                f"the graph's input {quoted(wanted.name)} of shape {quoted(wanted.shape)} is unknown or fixed"
            )
    return made


def _begins_empty(name: str, shape: Sequence[int | None]) -> bool:
    """Return whether a part of a cache has no fixed length: keys and values without places, or a state, which is zero at first."""
    if name.endswith(_STATES):
        return 0 < math.prod(size or 1 for size in shape) <= _MOST_VALUES
    return len(shape) == 4 and shape[2] in {None, 0}


def unsupported_error(why: str) -> QuantizationError:
    """Return the error for a graph that cannot be run on text."""
    return QuantizationError(
        f"the model is not run on the calibration text: {why}",
        reason="CALIBRATION_UNSUPPORTED",
        remedy="use int8_dynamic, int8 or int4, or export with shapes: dynamic",
    )
