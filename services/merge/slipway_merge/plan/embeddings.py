"""Replace rows of embeddings, and check that every token of the tokenizer has one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slipway.errors import ModelMergeError
from slipway.files.json_documents import LARGEST_LIST, read_json
from slipway.model.adapters.adapter_config import AdapterConfig
from slipway.model.adapters.refusals import UNMERGED_REMEDY, misfit, unsupported
from slipway.model.configuration import ModelConfig
from slipway.model.safetensors_file import TensorInfo
from slipway_merge.tensors.tensor_io import SAMPLE_ROWS, TensorReader, read_rows, sampled_rows, share_of_rounding
from slipway_merge.tensors.values import Computed, Value


def check_no_bias(config: AdapterConfig, name: str, bias: TensorInfo | None, reader: TensorReader) -> None:
    """Check that a head with replaced rows has no bias: peft ignores the bias in training and uses it again after the merge.

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


def replace_rows(module: str, info: TensorInfo, rows: tuple[int, ...], source: TensorInfo) -> Value:
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
        from slipway_merge.peft.modules import read_finite, read_widened

        weight = read_widened(source, dtype)
        weight[list(rows)] = read_finite(info, "the adapter").to(weight.dtype)
        values: np.ndarray = weight.numpy()
        return values

    def error(written: TensorInfo) -> float:
        kept = [row for row in sampled_rows(written) if row not in set(rows)]
        replaced = list(range(0, len(rows), 1 + len(rows) // SAMPLE_ROWS))
        with TensorReader() as reader:
            expected = np.concatenate([read_rows(reader, source, kept), read_rows(reader, info, replaced)])
            values = read_rows(reader, written, [*kept, *(rows[place] for place in replaced)])
        return share_of_rounding(values, expected, written.dtype)

    return Value(source, computed=Computed(module, "rows", compute, error))


def check_vocabulary(base: Path, adapter: Path, config: ModelConfig) -> None:
    """Check that the checkpoint's tokenizer has no id beyond the merged embedding, unless the base's tokenizer has one too.

    Raises:
        ModelMergeError: ``ADAPTER_BASE_MISMATCH``.
    """
    rows, highest = config.vocabulary, highest_token_id(adapter)
    if rows is None or highest is None or highest < rows:
        return
    before = highest_token_id(base)
    if before is not None and before >= highest:
        return
    raise ModelMergeError(
        f"the checkpoint's tokenizer has token ids up to {highest}, but the model has {rows} embeddings: the vocabulary "
        "was resized and the new embeddings are not in the adapter",
        reason="ADAPTER_BASE_MISMATCH",
        remedy="save the adapter again with save_embedding_layers=True, or with the base's own tokenizer",
        about={"file": adapter / "tokenizer.json", "vocab_size": rows},
    )


def highest_token_id(folder: Path) -> int | None:
    """Return the highest token id in a folder's ``tokenizer.json``; None without one."""
    try:
        tokenizer = read_json(folder / "tokenizer.json", largest=LARGEST_LIST, lenient=True)
    except (OSError, ValueError):
        return None
    if not isinstance(tokenizer, dict):
        return None
    added = tokenizer.get("added_tokens")
    ids = [entry.get("id") for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        ids.extend(vocabulary.values())
    elif isinstance(vocabulary, list):
        ids.append(len(vocabulary) - 1)
    return max((value for value in ids if isinstance(value, int)), default=None)
