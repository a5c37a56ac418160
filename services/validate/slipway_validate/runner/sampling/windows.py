"""Cut held-out text into windows of tokens with the model's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slipway.counts import counted
from slipway.model.families import DECODER
from slipway.model.model_files import has_chat_template
from slipway.proof.numerics import Ints
from slipway.proof.runtime import Unusable
from slipway_validate.cases import MIN_LENGTH
from slipway_validate.protocol.messages import TokenizeSpec


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder.

    Raises:
        Unusable: It has none that transformers can load.
    """
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise Unusable(f"transformers cannot load the tokenizer in {folder.name!r}: {error}") from error


def trained_tokenizer(folder: Path, base: Path) -> Any:
    """Load the tokenizer of a training. If it has no chat template, it gets the base's, as in the merged model.

    Raises:
        Unusable: As :func:`load_tokenizer`.
    """
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template and base != folder and has_chat_template(base):
        tokenizer.chat_template = load_tokenizer(base).chat_template
    return tokenizer


def cut(tokenizer: Any, text: str, *, spec: TokenizeSpec) -> Ints:
    """Cut windows (N, T) that do not overlap, spread over the whole text by the seed, in text order.

    If a decoder's tokenizer starts a text with a begin-of-text token, every window starts with it; for other families every
    window has the tokens that the tokenizer puts around a text.

    Raises:
        Unusable: The text is too short for one window of MIN_LENGTH tokens.
    """
    ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
    before, behind = _start_tokens(tokenizer) if spec.family == DECODER.name else tokens_around(tokenizer)
    around = len(before) + len(behind)
    body = min(spec.length - around, len(ids))
    if body + around < MIN_LENGTH or body < 1:
        raise Unusable(f"the held-out text has {counted(len(ids), 'token')}, and at least {MIN_LENGTH} are needed")
    slots = len(ids) // body
    chosen = np.sort(np.random.default_rng(spec.seed).permutation(slots)[: spec.windows])
    return np.stack([np.concatenate([before, ids[slot * body : (slot + 1) * body], behind]) for slot in chosen])


def tokens_around(tokenizer: Any) -> tuple[Ints, Ints]:
    """Return the tokens that a tokenizer puts before and after a text."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    starts = range(len(whole) - len(plain) + 1)
    start = next((at for at in starts if plain and whole[at : at + len(plain)] == plain), None)
    if start is None:
        return _tokens([]), _tokens([])
    return _tokens(whole[:start]), _tokens(whole[start + len(plain) :])


def _start_tokens(tokenizer: Any) -> tuple[Ints, Ints]:
    bos = tokenizer.bos_token_id
    with_special = tokenizer("a")["input_ids"]
    starts = bos is not None and with_special and with_special[0] == bos
    return _tokens([bos] if starts else []), _tokens([])


def _tokens(ids: list[int]) -> Ints:
    return np.array(ids, dtype=np.int64)
