"""Held-out text as windows of tokens, cut with the model's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slipway.counts import counted
from slipway_validate.numerics import Ints
from slipway_validate.protocol.messages import TokenizeSpec
from slipway_validate.runner.model import Unusable

MIN_LENGTH = 8


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        Unusable: There is none that transformers can load.
    """
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise Unusable(f"transformers cannot load the tokenizer in {folder.name!r}: {error}") from error


def cut(tokenizer: Any, text: str, *, spec: TokenizeSpec) -> Ints:
    """Windows (N, T) that do not overlap, spread over the whole text by the seed, in text order.

    A model that was trained with a token at the start of its input gets that token at the start of every window.

    Raises:
        Unusable: The text is too short for one window of MIN_LENGTH tokens.
    """
    ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
    start = _start_tokens(tokenizer)
    body = min(spec.length - len(start), len(ids))
    if body + len(start) < MIN_LENGTH:
        raise Unusable(f"the held-out text has {counted(len(ids), 'token')}, at least {MIN_LENGTH} are needed")
    slots = len(ids) // body
    chosen = np.sort(np.random.default_rng(spec.seed).permutation(slots)[: spec.windows])
    return np.stack([np.concatenate([start, ids[slot * body : (slot + 1) * body]]) for slot in chosen])


def _start_tokens(tokenizer: Any) -> Ints:
    bos = tokenizer.bos_token_id
    with_special = tokenizer("a")["input_ids"]
    starts = bos is not None and with_special and with_special[0] == bos
    return np.array([bos] if starts else [], dtype=np.int64)
