"""Read the weights of an ONNX folder: constants of products and lookups, dense, in blocks of ``MatMulNBits``, or int8 per output feature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from google.protobuf.message import DecodeError
from onnx_ir.serde import SerdeError
from torch import Tensor

from slipway.files.paths import file_in
from slipway.proof.constants import Constant, NamedConstants
from slipway.proof.stored_weights import (
    Coded,
    Dense,
    NotUnderstoodError,
    Smoothed,
    StoredWeight,
    count_non_finite,
    is_mask,
)

_FLOATS = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.DOUBLE: torch.float64,
}


class Graphs:
    """The graphs of an ONNX folder.

    Args:
        folder: The folder.
        rows: Function that returns the number of output features of a weight by its name; 0 if it is unknown.

    Raises:
        NotUnderstoodError: A graph cannot be read.
    """

    def __init__(self, folder: Path, rows: Callable[[str], int]) -> None:
        self._folder = folder
        self._tensors: dict[str, Any] = {}
        self._zeros: dict[str, str] = {}
        self._smoothing: dict[str, str] = {}
        paths = sorted(folder.glob("*.onnx"))
        if not paths:
            raise NotUnderstoodError("the folder has one graph per layer, or none")
        for path in paths:
            self._read(path)
        self._constants = NamedConstants(self._tensors, rows)
        self.names = self._constants.names

    def weight(self, name: str, *, turned: bool) -> StoredWeight:
        """As :meth:`slipway.proof.stored_weights.StoredModel.weight`."""
        constant = self._constants[name]
        if constant.bits:
            whole = self._blocks(constant)  # always (N, K)
        elif constant.channels:
            whole = self._channels(constant)  # likewise
        else:
            values = self._values(constant.name)
            if values.dim() != 2 or not values.is_floating_point():
                raise NotUnderstoodError(f"the graph has it as {tuple(values.shape)} of {values.dtype}")
            whole = Dense(values.T) if turned != constant.turned else Dense(values)
        return self._constants.part(name, whole)

    def non_finite(self) -> dict[str, int]:
        """As :meth:`slipway.proof.stored_weights.StoredModel.non_finite`; constants that the model's code made may hold infinity."""
        floats = {name: self._values(name) for name, tensor in self._tensors.items() if tensor.dtype in _FLOATS}
        weights = {self._constants[name].name for name in self.names}
        # A bias may hold one value everywhere, as a mask does.
        weights |= {name for name in floats if name.removesuffix(".fp16").endswith("bias")}
        return count_non_finite(
            {name: values for name, values in floats.items() if name in weights or not is_mask(values)}
        )

    def _read(self, path: Path) -> None:
        try:
            graph = ir.load(path).graph
        except (OSError, ValueError, DecodeError, SerdeError) as error:
            raise NotUnderstoodError(f"{path.name} cannot be read ({error})") from error
        for name, value in graph.initializers.items():
            if value.const_value is not None:
                self._tensors.setdefault(name, value.const_value)
        for node in graph:
            if node.op_type == "MatMulNBits" and len(node.inputs) > 3 and node.inputs[3] is not None:
                assert node.inputs[1] is not None
                self._zeros[str(node.inputs[1].name)] = str(node.inputs[3].name)
            if node.op_type == "MatMul":
                self._note_smoothing(node)

    def _note_smoothing(self, node: ir.Node) -> None:
        """Remember the factors that divide the input features of a product of integers; its weights are multiplied by them."""
        weights = _producer_input(node.inputs[1], "DequantizeLinear")
        codes = _producer_input(weights, "Transpose") or weights
        divided = _producer_input(_producer_input(node.inputs[0], "DequantizeLinear"), "QuantizeLinear")
        producer = divided.producer() if divided is not None else None
        inverse = producer.inputs[1] if producer is not None and producer.op_type == "Mul" else None
        if codes is not None and inverse is not None and str(inverse.name).endswith(".smoothing"):
            self._smoothing[str(codes.name)] = str(inverse.name)

    def _blocks(self, constant: Constant) -> StoredWeight:
        scale = f"{constant.name.rpartition('.')[0]}.scale"
        packed = self._values(constant.name)
        if scale not in self._tensors or packed.dim() != 3 or packed.dtype != torch.uint8:
            raise NotUnderstoodError("its integers are not stored as MatMulNBits takes them")
        rows, groups, size = packed.shape
        scales = self._values(scale).float().reshape(rows, -1)
        columns = groups * size * 8 // constant.bits
        if columns % max(1, scales.shape[1]):
            raise NotUnderstoodError("its scales do not fit its integers")
        middle = 1 << (constant.bits - 1)
        zeros = None
        if constant.name in self._zeros:
            codes = _unpack(self._values(self._zeros[constant.name]).reshape(rows, -1), slice(None), bits=constant.bits)
            zeros = codes[:, : scales.shape[1]].float() - middle
        return Coded(
            lambda taken: _unpack(packed, taken, bits=constant.bits) - middle,
            scales,
            zeros,
            (-middle, middle - 1),
            (rows, columns),
        )

    def _channels(self, constant: Constant) -> StoredWeight:
        codes, scale = self._values(constant.name), f"{constant.name}_scale"
        if scale not in self._tensors or codes.dim() != 2 or codes.dtype != torch.int8:
            raise NotUnderstoodError("its integers are not int8 with a scale per output feature")
        whole = codes.T if constant.turned else codes
        scales = self._values(scale)
        if scales.shape != whole.shape[:1] or not scales.is_floating_point():
            raise NotUnderstoodError("its scales do not fit its integers")
        coded = Coded(lambda taken: whole[taken].int(), scales[:, None], None, (-127, 127), tuple(whole.shape))
        if constant.name not in self._smoothing:
            return coded
        inverse = self._values(self._smoothing[constant.name])
        if inverse.shape != whole.shape[1:]:
            raise NotUnderstoodError("the factors of its input features do not fit its integers")
        return Smoothed(coded, inverse)

    def _values(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if not isinstance(tensor, ir.ExternalTensor):
            if tensor is None:
                raise NotUnderstoodError(f"the graph has no constant {name!r}")
            values = np.array(tensor.numpy())
            return torch.from_numpy(values.astype(np.float32) if tensor.dtype == ir.DataType.BFLOAT16 else values)
        dtype = {**_FLOATS, ir.DataType.UINT8: torch.uint8, ir.DataType.INT8: torch.int8}.get(tensor.dtype)
        if dtype is None:
            raise NotUnderstoodError(f"constant {name!r} has the type {tensor.dtype.name}")
        shape = tuple(int(size) for size in tensor.shape.numpy())
        path = file_in(self._folder, str(tensor.location))
        offset, length = tensor.offset or 0, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if path is None or offset < 0 or offset + length > path.stat().st_size:
            raise NotUnderstoodError(f"the data of constant {name!r} is not in the folder")
        if not length:
            return torch.empty(shape, dtype=dtype)
        raw = np.memmap(path, mode="c", dtype=np.uint8, offset=offset, shape=(length,))
        return torch.from_numpy(raw).view(dtype).reshape(shape)


def _producer_input(value: ir.Value | None, operator: str) -> ir.Value | None:
    """Return the first input of the node that makes a value, if it is this operator; otherwise None."""
    producer = value.producer() if value is not None else None
    return producer.inputs[0] if producer is not None and producer.op_type == operator and producer.inputs else None


def _unpack(packed: Tensor, rows: slice, *, bits: int) -> Tensor:
    """Unpack unsigned codes, int32 (R, K), the first of two in the low half of a byte."""
    bytes_ = packed[rows].reshape(len(packed[rows]), -1)
    if bits == 4:
        bytes_ = torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).reshape(len(bytes_), -1)
    return bytes_.int()
