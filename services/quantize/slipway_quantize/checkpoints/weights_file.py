"""Write safetensors whose layout is known before the first weight is read, so that no weight stays in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipway.model.safetensors_file import TensorInfo
from slipway.model.safetensors_layout import PlannedFile, TensorSpec, index_file, plan_files
from slipway_quantize.model_weights import DTYPE_NAMES
from slipway_quantize.pieces import write_all


class WeightsFile:
    """A Hugging Face folder's weights, written in any order.

    One ``model.safetensors``, or shards of at most ``max_shard_bytes`` (one larger tensor makes one larger shard) with
    their index. The tensors of one group stay in one shard, because loaders expect the parts of a quantized weight
    together.

    Args:
        folder: Existing folder to write into.
        groups: Every tensor that will be written, in groups.
        max_shard_bytes: Largest size of one file's data.
    """

    def __init__(self, folder: Path, groups: Sequence[Sequence[TensorSpec]], *, max_shard_bytes: int) -> None:
        files = plan_files(groups, max_shard_bytes=max_shard_bytes)
        self._places: dict[str, tuple[int, TensorInfo]] = {}
        self._open = ExitStack()
        try:
            for file in files:
                self._create(folder, file)
        except BaseException:
            self._open.close()
            raise
        weight_map = {tensor.name: file.filename for file in files for tensor in file.tensors}
        total = sum(tensor.nbytes for file in files for tensor in file.tensors)
        if index := index_file(weight_map, total_bytes=total):
            (folder / index[0]).write_text(index[1], encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def write(self, name: str, values: Tensor, *, row: int = 0) -> None:
        """Write ``values`` as rows of tensor ``name``, starting at ``row``.

        Raises:
            OSError: For example ENOSPC.
        """
        place = self._places[name][1]
        if DTYPE_NAMES[values.dtype] != place.dtype or tuple(values.shape[1:]) != place.shape[1:]:
            raise AssertionError(f"{name}: {values.dtype} {tuple(values.shape)} does not fit {place}")
        self.write_bytes(name, values.contiguous().reshape(-1).view(torch.uint8).numpy(), row=row)

    def write_bytes(self, name: str, values: NDArray[Any], *, row: int) -> None:
        """Write the bytes of an array as rows of tensor ``name``, starting at ``row``; several threads can write at once.

        Raises:
            OSError: For example ENOSPC.
        """
        descriptor, place = self._places[name]
        row_bytes = place.nbytes // max(1, place.shape[0]) if place.shape else 0
        write_all(descriptor, values.reshape(-1).view(np.uint8).data, place.start + row * row_bytes)

    def _create(self, folder: Path, file: PlannedFile) -> None:
        descriptor = os.open(folder / file.filename, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._open.callback(os.close, descriptor)
        write_all(descriptor, memoryview(file.header), 0)
        os.truncate(descriptor, file.nbytes)
        self._places |= {tensor.name: (descriptor, tensor) for tensor in file.tensors}
