"""Run graphs on text, with further results."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from slipway.errors import QuantizationError
from slipway.machine.threads import session_options
from slipway.stage import Context
from slipway_quantize.activations.text import unsupported
from slipway_quantize.graphs.folder import DataFile, Shared, copy_external, graph_files, load_graph, save_graph
from slipway_quantize.graphs.left_out import LeftOutSource

_DATA = "session.model_external_initializers_file_folder_path"


@contextmanager
def complete(source: Path, left_out: LeftOutSource, ctx: Context) -> Iterator[Path]:
    """Give a folder in which the only graph of ``source`` has all its weights; one that is made is removed afterwards.

    Raises:
        QuantizationError: ``CALIBRATION_UNSUPPORTED``: there are several graphs.
    """
    names = graph_files(source)
    if len(names) != 1:
        raise unsupported(f"it has {len(names)} graphs, which pass values to each other")
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
        # The usual order makes all weights floats first (DequantizeLinear), and frees none before its product runs.
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
