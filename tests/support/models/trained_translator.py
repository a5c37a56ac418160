"""Train a small Marian that translates words of one invented language into those of another, with sentences that it has not seen."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
import transformers as tf

from slipway.sample.tokenizer import train_tokenizer

SENTENCES = 48
_WORDS, _KNOWN, _STEPS, _RATE, _BATCH = 48, 4000, 800, 3e-3, 32
_SHAPE = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64, "dropout": 0.0,
    "scale_embedding": True,
}  # fmt: skip


def make_translator(root: Path) -> None:
    """Write ``model/``, ``expected.jsonl``, ``heldout/`` and ``train/`` into a folder; some 20 seconds of a core."""
    draw = random.Random(0)
    dictionary = {_word(draw, "abcdefgh"): _word(draw, "pqrstuvw") for _ in range(_WORDS)}
    sources = sorted(dictionary)
    sentences = [" ".join(draw.choices(sources, k=draw.randint(3, 8))) for _ in range(_KNOWN + SENTENCES)]
    pairs = [(one, " ".join(dictionary[word] for word in one.split())) for one in dict.fromkeys(sentences)]
    known, unknown = pairs[:-SENTENCES], pairs[-SENTENCES:]
    tokenizer = train_tokenizer([text for pair in known for text in pair], vocab_size=384, max_length=64)
    model = _train(tokenizer, known)
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    lines = (json.dumps({"source": source, "target": target}) + "\n" for source, target in unknown)
    (root / "expected.jsonl").write_text("".join(lines))
    for name, part in (("train", known[:1500]), ("heldout", unknown)):
        (root / name).mkdir()
        (root / name / "text.txt").write_text("\n\n".join(source for source, _ in part))


def _word(draw: random.Random, letters: str) -> str:
    return "".join(draw.choices(letters, k=draw.randint(3, 6)))


def _train(tokenizer: tf.PreTrainedTokenizerFast, known: list[tuple[str, str]]) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    padding, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    special = {"pad_token_id": padding, "eos_token_id": end, "decoder_start_token_id": padding, "bos_token_id": None}
    model = tf.MarianMTModel(tf.MarianConfig(**_SHAPE, **special, vocab_size=len(tokenizer), forced_eos_token_id=None))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    fall = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40) * (1 - step / _STEPS))
    draw = random.Random(1)
    for _ in range(_STEPS):
        chosen = draw.choices(known, k=_BATCH)
        given = tokenizer([source for source, _ in chosen], padding=True, return_tensors="pt")
        wanted = tokenizer(
            [target + str(tokenizer.eos_token) for _, target in chosen], padding=True, return_tensors="pt"
        )
        labels = wanted["input_ids"].masked_fill(wanted["attention_mask"] == 0, -100)
        model(**given, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        fall.step()
    return model.eval()
