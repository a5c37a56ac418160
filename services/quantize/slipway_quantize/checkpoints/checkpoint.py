"""Read the weights of a Hugging Face folder, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipway.counts import counted
from slipway.errors import QuantizationError
from slipway.models.dtypes import FLOATS, torch_dtypes
from slipway.models.safetensors_file import read_index

CHUNK_ELEMENTS = 1 << 20  # 4 MiB in float32: small beside any real tensor, large beside the cost of a call

DTYPES = torch_dtypes(*FLOATS, "I64", "I32", "I16", "I8", "U8", "BOOL")
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor in a checkpoint's header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor's data."""
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return torch.Size(self.shape).numel()


class Checkpoint:
    """The tensors of ``model.safetensors`` or of the shards its index lists, memory-mapped.

    Args:
        folder: A Hugging Face model folder.

    Raises:
        QuantizationError: ``BASE_MODEL_INVALID`` without safetensors or with a shard missing, ``SAFETENSORS_CORRUPT``
            if a file is truncated or its header is not valid, ``DTYPE_UNSUPPORTED`` for 8-bit floats and the like.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._open = ExitStack()
        try:
            for file in self._file_names():
                self._read_header(file)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the tensor in pieces along its first axis: (first row, rows). A scalar is one piece of shape ()."""
        info = self.tensors[name]
        file = self._files[self._where[name]]
        if len(info.shape) == 0 or info.numel == 0:
            yield 0, file.get_tensor(name)
            return
        view = file.get_slice(name)
        step = max(1, CHUNK_ELEMENTS // max(1, info.numel // info.shape[0]))
        for start in range(0, info.shape[0], step):
            yield start, view[start : start + step]

    def _file_names(self) -> list[str]:
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            return ["model.safetensors"]
        return sorted(set(read_index(index).values()))

    def _read_header(self, file: str) -> None:
        path = self.folder / file
        if not path.is_file():
            raise QuantizationError(
                f"the model folder has no {file}",
                reason="BASE_MODEL_INVALID",
                remedy="a model folder holds model.safetensors, or an index and every shard it lists",
                about={"file": file},
            )
        try:
            opened = self._open.enter_context(safe_open(path, framework="pt"))
            views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        except SafetensorError as error:
            raise QuantizationError(
                f"{file} is truncated or its header is not valid ({error})",
                reason="SAFETENSORS_CORRUPT",
                remedy="copy or download the file again",
                about={"file": file},
            ) from error
        self._files[file] = opened
        for name in sorted(views):
            self._where[name] = file
            self.tensors[name] = _tensor_info(name, views[name], file=file)


def _tensor_info(name: str, view: Any, *, file: str) -> TensorInfo:
    dtype = DTYPES.get(view.get_dtype())
    if dtype is None:
        raise QuantizationError(
            f"tensor {name!r} in {file} has the data type {view.get_dtype()}, which cannot be converted",
            reason="DTYPE_UNSUPPORTED",
            remedy="start from weights in float32, bfloat16 or float16",
            about={"tensor": name, "file": file},
        )
    return TensorInfo(name=name, dtype=dtype, shape=tuple(view.get_shape()))


def require_finite(values: Tensor, name: str) -> None:
    """Refuse NaN and infinity.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS``, with the tensor's name and the number of values that are not finite.
    """
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        count = int((~torch.isfinite(values)).sum())
        raise QuantizationError(
            f"tensor {name!r} has {counted(count, 'NaN or infinite value')}",
            reason="NON_FINITE_WEIGHTS",
            remedy="the training diverged or the file is damaged: use an earlier checkpoint",
            about={"tensor": name, "count": count},
        )


def cast_to_half(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Convert finite ``values`` to ``dtype``; a value beyond its range is an error and never becomes infinity.

    Raises:
        QuantizationError: ``NON_FINITE_WEIGHTS`` or ``WEIGHT_OVERFLOW``.
    """
    require_finite(values, name)
    cast = values.to(dtype)
    if not bool(torch.isfinite(cast).all()):
        largest = float(values.abs().max())
        raise QuantizationError(
            f"tensor {name!r} holds {largest:.6g}, beyond the range of {dtype} (at most {torch.finfo(dtype).max:.6g})",
            reason="WEIGHT_OVERFLOW",
            remedy="use bf16, which has the range of float32, or int8",
            about={"tensor": name, "largest": largest, "dtype": str(dtype).removeprefix("torch.")},
        )
    return cast
