"""The data types of stored tensors: their sizes, and what each library calls them.

Source: https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs, enum Dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch


class Dtype(NamedTuple):
    """One data type; a library that does not have it has an empty name for it.

    Attributes:
        name: In a safetensors header.
        bits: Of one element.
        torch: In torch, in numpy or else ml_dtypes, and as ``dtype`` in a ``config.json``.
        onnx: In ONNX's enum of types.
    """

    name: str
    bits: int
    torch: str = ""
    onnx: str = ""


DTYPES = {
    row[0]: Dtype(*row)
    for row in (
        ("F64", 64, "float64", "DOUBLE"),
        ("F32", 32, "float32", "FLOAT"),
        ("F16", 16, "float16", "FLOAT16"),
        ("BF16", 16, "bfloat16", "BFLOAT16"),
        ("F8_E4M3", 8, "float8_e4m3fn", "FLOAT8E4M3FN"),
        ("F8_E5M2", 8, "float8_e5m2", "FLOAT8E5M2"),
        ("F8_E8M0", 8, "float8_e8m0fnu", "FLOAT8E8M0"),
        ("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", "FLOAT8E4M3FNUZ"),
        ("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", "FLOAT8E5M2FNUZ"),
        ("F6_E2M3", 6),
        ("F6_E3M2", 6),
        ("F4", 4),
        ("C64", 64, "complex64", "COMPLEX64"),
        ("I64", 64, "int64", "INT64"),
        ("I32", 32, "int32", "INT32"),
        ("I16", 16, "int16", "INT16"),
        ("I8", 8, "int8", "INT8"),
        ("U64", 64, "uint64", "UINT64"),
        ("U32", 32, "uint32", "UINT32"),
        ("U16", 16, "uint16", "UINT16"),
        ("U8", 8, "uint8", "UINT8"),
        ("BOOL", 8, "bool", "BOOL"),
    )
}
"""By name in a safetensors header, which are the types that a file may have."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of weights that are computed with as they are stored."""


def torch_dtypes(*names: str) -> dict[str, torch.dtype]:
    """Return torch's types by their safetensors names. Imports torch."""
    import torch

    return {name: getattr(torch, DTYPES[name].torch) for name in names}


def numpy_dtypes(*names: str) -> dict[str, np.dtype[Any]]:
    """Return numpy's types by their safetensors names. Imports numpy, and ml_dtypes for a type that numpy does not have."""
    import numpy as np

    return {name: np.dtype(_numpy_name(name)) for name in names}


def _numpy_name(name: str) -> Any:
    if name == "BF16" or name.startswith("F8"):
        import ml_dtypes

        return getattr(ml_dtypes, DTYPES[name].torch)
    return DTYPES[name].torch
