"""Writing safetensors whose layout is known before the first weight is read, so that nothing is held in memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from slipway_quantize.checkpoint import DTYPE_NAMES, TensorInfo


def tensor_bytes(values: Tensor) -> memoryview:
    """The tensor's data as little-endian bytes."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write every byte at ``offset``; a plain ``pwrite`` may stop short.

    Raises:
        OSError: For example ENOSPC.
    """
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


@dataclass(frozen=True, slots=True)
class _Place:
    descriptor: int
    offset: int
    info: TensorInfo


class WeightsFile:
    """A Hugging Face folder's weights, written at any place in any order.

    One ``model.safetensors``, or shards of at most ``max_shard_bytes`` (one larger tensor makes one larger shard) with
    their index. Tensors given together in one group stay in one shard, because loaders expect the parts of a quantized
    weight side by side.

    Args:
        folder: Folder to write into; it exists.
        groups: Every tensor that will be written.
        max_shard_bytes: Largest size of one file's data.
    """

    def __init__(self, folder: Path, groups: Sequence[Sequence[TensorInfo]], *, max_shard_bytes: int) -> None:
        shards = _shards(groups, max_shard_bytes)
        self.total_bytes = sum(info.nbytes for shard in shards for info in shard)
        self._places: dict[str, _Place] = {}
        self._open = ExitStack()
        names = {
            number: "model.safetensors"
            if len(shards) == 1
            else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            for number in range(len(shards))
        }
        try:
            for number, shard in enumerate(shards):
                self._create(folder / names[number], shard)
        except BaseException:
            self._open.close()
            raise
        if len(shards) > 1:
            weight_map = {info.name: names[number] for number, shard in enumerate(shards) for info in shard}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def write(self, name: str, values: Tensor, *, row: int = 0) -> None:
        """Write ``values`` as the rows of tensor ``name`` that begin at ``row``.

        Raises:
            OSError: For example ENOSPC.
        """
        place = self._places[name]
        if values.dtype != place.info.dtype or tuple(values.shape[1:]) != place.info.shape[1:]:
            raise AssertionError(f"{name}: {values.dtype} {tuple(values.shape)} does not fit {place.info}")
        row_bytes = place.info.nbytes // max(1, place.info.shape[0]) if place.info.shape else 0
        write_all(place.descriptor, tensor_bytes(values), place.offset + row * row_bytes)

    def _create(self, path: Path, shard: Sequence[TensorInfo]) -> None:
        # Wider types first keeps every tensor aligned to its own size, as the reference writer does.
        ordered = sorted(shard, key=lambda info: (-info.dtype.itemsize, info.name))
        header: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for info in ordered:
            span = [offset, offset + info.nbytes]
            header[info.name] = {
                "dtype": DTYPE_NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": span,
            }
            offset += info.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._open.callback(os.close, descriptor)
        start = 8 + len(text)
        write_all(descriptor, memoryview(struct.pack("<Q", len(text)) + text), 0)
        os.truncate(descriptor, start + offset)
        offset = start
        for info in ordered:
            self._places[info.name] = _Place(descriptor=descriptor, offset=offset, info=info)
            offset += info.nbytes


def _shards(groups: Sequence[Sequence[TensorInfo]], max_shard_bytes: int) -> list[list[TensorInfo]]:
    shards: list[list[TensorInfo]] = [[]]
    filled = 0
    for group in groups:
        size = sum(info.nbytes for info in group)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].extend(group)
        filled += size
    return shards
