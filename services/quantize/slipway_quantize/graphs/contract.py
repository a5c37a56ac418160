"""Update the types in the contract of activations after quantization."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from slipway.errors import ConfigurationError, QuantizationError
from slipway.model.activations.contract import CONTRACT, read_contract
from slipway_quantize.graphs.folder import load_graph


def restate_contract(folder: Path) -> None:
    """Replace the copied contract of a folder, if it has one; the copy names the types before quantization.

    Raises:
        QuantizationError: ``ONNX_INVALID`` if the contract cannot be read, or names an output that the graph lacks.
    """
    path = folder / CONTRACT
    if not path.is_file():
        return
    try:
        contract = read_contract(path)
    except ConfigurationError as error:
        raise QuantizationError(error.message, reason="ONNX_INVALID", remedy="export the ONNX model again") from error
    dtypes: dict[str, str] = {}
    for graph in contract.graphs:
        outputs = load_graph(folder, _require_file(folder, graph.file)).graph.outputs
        returned = {value.name: _DTYPES.get(value.dtype, "") for value in outputs if value.name and value.dtype}
        wrong = [each.name for each in graph.outputs if not returned.get(each.name)]
        if wrong:
            raise QuantizationError(
                f"{CONTRACT} names the output {wrong[0]!r}, which {graph.file} does not return as floats",
                reason="ONNX_INVALID",
                remedy="export the ONNX model again",
                about={"file": CONTRACT, "output": wrong[0]},
            )
        dtypes |= {name: dtype for name, dtype in returned.items() if dtype}
    contract.with_dtypes(dtypes).write(folder)


def _require_file(folder: Path, name: str) -> str:
    """Return the name if the folder has such a graph; a contract may name anything."""
    if name not in {path.name for path in folder.glob("*.onnx")}:
        raise QuantizationError(
            f"{CONTRACT} describes {name!r}, which the folder lacks",
            reason="ONNX_INVALID",
            remedy="export the ONNX model again",
            about={"file": CONTRACT},
        )
    return name


_DTYPES = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16"}
