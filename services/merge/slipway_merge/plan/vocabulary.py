"""Refuse a tokenizer with more tokens than the model has embeddings: the vocabulary was resized and the rows were not saved."""

from __future__ import annotations

from pathlib import Path

from slipway.errors import ModelMergeError
from slipway.files.json_documents import LARGEST_LIST, read_json
from slipway.model.configuration import ModelConfig


def check_vocabulary(base: Path, adapter: Path, config: ModelConfig) -> None:
    """Check that the checkpoint's tokenizer has no id beyond the merged embedding, unless the base's tokenizer has too.

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
