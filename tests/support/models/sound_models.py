"""Tokenizers with the tokens of a codec of sound, and a tiny Llama that writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipway.model.tokens.sound import SoundCodec
from support.models.tokenizers_of_kinds import MARKS, byte_level

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sound_tokenizer(codec: SoundCodec, folder: Path, *, count: int = 1024, special: bool = False) -> Any:
    """Save a tokenizer of text with ``count`` tokens of a codec, and return it."""
    from tokenizers import AddedToken

    tokenizer = byte_level((_QWEN2,))
    texts = [*([codec.mark] if codec.mark else []), *(f"{codec.begin}{number}{codec.end}" for number in range(count))]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=special) for text in texts])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": MARKS[0], "eos_token": MARKS[1], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def make_speaker(codec: SoundCodec, folder: Path, *, special: bool = False) -> Any:
    """Save a Llama of two layers that answers with tokens of a codec alone, and return it."""
    import torch
    import transformers

    size = sound_tokenizer(codec, folder, special=special).get_vocab_size()
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        model.lm_head.weight[: size - 1024] = 0  # text has the same small chance everywhere
    model.save_pretrained(folder)
    return model
