"""Run a decoder's graph in calls of any length, by code of the tests' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnxruntime import InferenceSession


def empty_cache(session: InferenceSession, rows: int) -> dict[str, np.ndarray]:
    """Return what a graph keeps before the first token: an axis that varies is empty, and all else is zero."""
    kept = [value for value in session.get_inputs() if value.name.startswith("past_key_values.")]
    return {
        value.name: np.zeros(
            (rows, *(size if isinstance(size, int) else 0 for size in value.shape[1:])),
            np.float16 if "float16" in value.type else np.float32,
        )
        for value in kept
    }


def logits_of(folder: Path, tokens: np.ndarray, mask: np.ndarray, calls: list[int]) -> np.ndarray:
    """Return logits of rows that are fed in calls of these lengths. tokens, mask: (rows, tokens)."""
    session = InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    taken = {value.name for value in session.get_inputs()}
    cache, pieces, past = empty_cache(session, len(tokens)), [], 0
    for new in calls:
        end = past + new
        feed = {
            "input_ids": tokens[:, past:end],
            "attention_mask": mask[:, :end],
            "position_ids": np.maximum(mask.cumsum(1) - 1, 0)[:, past:end],
        }
        feed = {name: value for name, value in feed.items() if name in taken}
        results = dict(zip(names, session.run(names, feed | cache), strict=True))
        pieces.append(results.pop("logits"))
        cache = {name.replace("present.", "past_key_values."): value for name, value in results.items()}
        past = end
    return np.concatenate(pieces, axis=1)


def assert_same(folder: Path, model: Any, *, limit: float = 1e-4) -> None:
    """Assert that a graph gives each row, padded on its left and fed in calls of several lengths, what transformers gives the row alone at once."""
    pads, calls = [0, 5], [9, 1, 1, 4, 1]
    tokens = np.random.default_rng(5).integers(3, 300, (len(pads), sum(calls)))
    mask = (np.arange(sum(calls)) >= np.array(pads)[:, None]).astype(np.int64)
    found = logits_of(folder, tokens, mask, calls)
    for row, pad in enumerate(pads):
        with torch.no_grad():
            wanted = model(input_ids=torch.from_numpy(tokens[row : row + 1, pad:])).logits[0].numpy()
        assert np.abs(found[row, pad:] - wanted).max() < limit * max(1.0, np.abs(wanted).max())
