"""Stand in for weights that are made only when they are read: engines name, slice and transpose weights, and read none."""

from __future__ import annotations

import mmap
import warnings

import numpy as np
import torch

from slipway.model.dtypes import torch_dtypes
from slipway.model.safetensors_file import TensorInfo


def stand_in(info: TensorInfo) -> torch.Tensor:
    """Return a tensor of this type and shape at addresses of its own that take no memory. Its values must not be read."""
    memory = mmap.mmap(-1, max(info.nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that cannot be written
        values = torch.from_numpy(np.frombuffer(memory, np.uint8, count=info.nbytes))
    return values.view(torch_dtypes(info.dtype)[info.dtype]).reshape(info.shape)
