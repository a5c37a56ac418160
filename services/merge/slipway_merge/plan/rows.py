"""Rows of an embedding that the adapter replaces (``trainable_token_indices``)."""

from __future__ import annotations

import numpy as np

from slipway.model.adapters.adapter_config import AdapterConfig
from slipway.model.adapters.refusals import UNMERGED_REMEDY, misfit, unsupported
from slipway.model.safetensors_file import TensorInfo
from slipway_merge.tensors.samples import SAMPLE_ROWS, read_rows, sampled_rows, share_of_rounding
from slipway_merge.tensors.tensor_io import TensorReader
from slipway_merge.tensors.values import Computed, Value


def check_no_bias(config: AdapterConfig, name: str, bias: TensorInfo | None, reader: TensorReader) -> None:
    """Check that a head with such rows has no bias: peft ignores the bias in training and uses it again after the merge.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED``.
    """
    if bias is not None and reader.read(bias).any():
        raise unsupported(
            "trainable_token_indices",
            config.tokens,
            f"they are rows of {name!r} too, and peft trains those without the layer's bias {bias.name!r}",
            remedy=UNMERGED_REMEDY,
        )


def replaced_rows(module: str, info: TensorInfo, rows: tuple[int, ...], source: TensorInfo) -> Value:
    """Return the weight with its ``rows`` replaced by those of ``info``.

    Raises:
        ModelMergeError: ``ADAPTER_BASE_MISMATCH`` if a row does not exist or has another width.
    """
    if len(source.shape) != 2 or info.shape[1:] != source.shape[1:] or max(rows, default=0) >= source.shape[0]:
        raise misfit(
            f"adapter tensor {info.name!r} {info.shape} replaces rows up to {max(rows, default=0)} of {source.name!r} "
            f"{source.shape}, which do not fit",
            tensor=info.name,
            shape=info.shape,
            base_shape=source.shape,
        )

    def compute(dtype: np.dtype[np.floating]) -> np.ndarray:
        from slipway_merge.peft.modules import read_finite, widened

        weight = widened(source, dtype)
        weight[list(rows)] = read_finite(info, "the adapter").to(weight.dtype)
        values: np.ndarray = weight.numpy()
        return values

    def error(written: TensorInfo) -> float:
        kept = [row for row in sampled_rows(written) if row not in set(rows)]
        replaced = list(range(0, len(rows), 1 + len(rows) // SAMPLE_ROWS))
        with TensorReader() as reader:
            expected = np.concatenate([read_rows(reader, source, kept), read_rows(reader, info, replaced)])
            found = read_rows(reader, written, [*kept, *(rows[place] for place in replaced)])
        return share_of_rounding(found, expected, written.dtype)

    return Value(source, computed=Computed(module, "rows", compute, error))
