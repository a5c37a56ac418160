"""GPT-2."""

from __future__ import annotations

from typing import Any

import transformers as tf

from support.models.gguf_family import BY_TABLE, Family
from support.models.gguf_sizes import VOCABULARY


def _gpt2() -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


FAMILIES = {
    "gpt2": Family(_gpt2, most=BY_TABLE),
}
