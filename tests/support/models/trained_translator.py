"""Train a small Marian that translates words of one invented language into those of another, and an adapter of it, with sentences that it has not seen."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from slipway.sample.models import train_tokenizer

SENTENCES = 48
_WORDS, _KNOWN, _STEPS, _TUNING_STEPS, _RATE, _BATCH = 48, 4000, 800, 300, 3e-3, 32
_SHAPE = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64, "dropout": 0.0,
    "scale_embedding": True,
}  # fmt: skip
Pairs = list[tuple[str, str]]


def make_translator(root: Path) -> None:
    """Write ``model/``, ``expected.jsonl``, ``heldout/`` and ``train/`` into a folder; some 20 seconds of a core."""
    known, unknown = _pairs(tuned=False)
    tokenizer = train_tokenizer([text for pair in known for text in pair], vocab_size=384, max_length=64)
    torch.manual_seed(0)
    padding, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    special = {"pad_token_id": padding, "eos_token_id": end, "decoder_start_token_id": padding, "bos_token_id": None}
    model = tf.MarianMTModel(tf.MarianConfig(**_SHAPE, **special, vocab_size=len(tokenizer), forced_eos_token_id=None))
    _train(model, tokenizer, known, steps=_STEPS)
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    _write_pairs(unknown, root / "expected.jsonl")
    for name, part in (("train", known[:1500]), ("heldout", unknown)):
        (root / name).mkdir()
        (root / name / "text.txt").write_text("\n\n".join(source for source, _ in part))


def tune_translator(root: Path) -> None:
    """Write ``adapter/`` beside the model of :func:`make_translator`, and ``tuned.jsonl``; some 10 seconds of a core.

    By the adapter a third of the words exchange their translations, so what loses the adapter is wrong about most sentences.
    """
    known, unknown = _pairs(tuned=True)
    torch.manual_seed(1)
    base = tf.AutoModelForSeq2SeqLM.from_pretrained(root / "model")
    layers = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    tuned = get_peft_model(base, LoraConfig(r=8, lora_alpha=12, target_modules=layers, task_type="SEQ_2_SEQ_LM"))
    _train(tuned, tf.AutoTokenizer.from_pretrained(root / "model"), known, steps=_TUNING_STEPS)
    tuned.save_pretrained(root / "adapter")
    _write_pairs(unknown, root / "tuned.jsonl")


def _pairs(*, tuned: bool) -> tuple[Pairs, Pairs]:
    """Return the sentences to train with and those held out, with their translations."""
    draw = random.Random(0)
    dictionary = {_word(draw, "abcdefgh"): _word(draw, "pqrstuvw") for _ in range(_WORDS)}
    sources = sorted(dictionary)
    sentences = [" ".join(draw.choices(sources, k=draw.randint(3, 8))) for _ in range(_KNOWN + SENTENCES)]
    if tuned:
        exchanged = sources[: _WORDS // 3]
        dictionary |= {
            word: dictionary[other] for word, other in zip(exchanged, exchanged[1:] + exchanged[:1], strict=True)
        }
    pairs = [(one, " ".join(dictionary[word] for word in one.split())) for one in dict.fromkeys(sentences)]
    return pairs[:-SENTENCES], pairs[-SENTENCES:]


def _word(draw: random.Random, letters: str) -> str:
    return "".join(draw.choices(letters, k=draw.randint(3, 6)))


def _write_pairs(pairs: Pairs, path: Path) -> None:
    path.write_text("".join(json.dumps({"source": source, "target": target}) + "\n" for source, target in pairs))


def _train(model: Any, tokenizer: Any, known: Pairs, *, steps: int) -> None:
    """Train the parameters of a model that require gradients."""
    model.train()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    fall = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40) * (1 - step / steps))
    draw = random.Random(1)
    for _ in range(steps):
        chosen = draw.choices(known, k=_BATCH)
        given = tokenizer([source for source, _ in chosen], padding=True, return_tensors="pt")
        wanted = tokenizer(
            [target + str(tokenizer.eos_token) for _, target in chosen], padding=True, return_tensors="pt"
        )
        labels = wanted["input_ids"].masked_fill(wanted["attention_mask"] == 0, -100)
        model(input_ids=given["input_ids"], attention_mask=given["attention_mask"], labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        fall.step()
    model.eval()
