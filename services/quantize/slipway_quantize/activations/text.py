"""Give graphs windows of text, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.errors import QuantizationError
from slipway.model.configuration import ModelConfig
from slipway.model.families import Comparison, Family
from slipway.texts import quoted
from slipway_quantize.calibration.windows import read_windows

Array = NDArray[Any]
WINDOWS, WINDOW_TOKENS = 128, 128
"""An eighth of them judges; more text moves the ranges of the trained sample by less than a step."""


class Text:
    """Windows of the calibration text for one model.

    Args:
        data: Folder with ``calibration.jsonl``.
        model: Folder with the model's tokenizer and ``config.json``.
        seed: Seed of the choice.
        windows: Most windows.

    Attributes:
        family: The model's family.
        fit: Windows to find ranges with. (tokens,) each
        held_out: Windows to judge by.
        digest: SHA-256 of the text.

    Raises:
        QuantizationError: ``CALIBRATION_DATA_INVALID``; ``CALIBRATION_UNSUPPORTED``: text alone is no input of such a model.
    """

    def __init__(self, data: Path, model: Path, *, seed: int = 0, windows: int = WINDOWS) -> None:
        config = ModelConfig.read(model)
        family = config.family
        if family is None or family.comparison is Comparison.TEACHER_FORCED:
            raise unsupported(f"what a {config.description} computes on plain text is unknown")
        vocabulary = config.get("vocab_size")
        if not isinstance(vocabulary, int) or isinstance(vocabulary, bool):
            raise unsupported(f"config.json of this {config.description} has no vocab_size")
        cut = read_windows(data, model, family, count=windows, length=WINDOW_TOKENS, vocabulary=vocabulary, seed=seed)
        self.family: Family = family
        self.fit: Sequence[Array] = [window.numpy() for window in cut.fit]
        self.held_out: Sequence[Array] = [window.numpy() for window in cut.held_out]
        self.digest = cut.digest


def feeds(inputs: Sequence[Any], window: Array) -> dict[str, Array]:
    """Return values for a graph's inputs: one window with an empty cache.

    Raises:
        QuantizationError: ``CALIBRATION_UNSUPPORTED``: the graph has another input, or fixed lengths.
    """
    tokens = window[None].astype(np.int64)  # (1, tokens)
    known = {
        "input_ids": tokens,
        "attention_mask": np.ones_like(tokens),
        "position_ids": np.arange(tokens.shape[1], dtype=np.int64)[None],
        "token_type_ids": np.zeros_like(tokens),
    }
    made = {}
    for wanted in inputs:
        shape = [int(size) if isinstance(size, int) else None for size in wanted.shape]
        if wanted.name in known and len(shape) == 2 and shape[1] in {None, tokens.shape[1]}:
            made[wanted.name] = np.repeat(known[wanted.name], shape[0] or 1, axis=0)
        elif wanted.name.startswith("past_key_values.") and len(shape) == 4 and shape[2] in {None, 0}:
            sizes = [shape[0] or 1, shape[1] or 0, 0, shape[3] or 0]
            made[wanted.name] = np.zeros(sizes, np.float16 if "float16" in wanted.type else np.float32)
        else:
            raise unsupported(
                f"the graph's input {quoted(wanted.name)} of shape {quoted(wanted.shape)} is unknown or fixed"
            )
    return made


def unsupported(why: str) -> QuantizationError:
    """Return the error for a graph that cannot be run on text."""
    return QuantizationError(
        f"the model is not run on the calibration text: {why}",
        reason="CALIBRATION_UNSUPPORTED",
        remedy="use int8_dynamic, int8 or int4, or export with shapes: dynamic",
    )
