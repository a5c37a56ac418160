"""Train a small BERT that says from which module of Python's library a passage is, and an adapter of it, with held-out passages and their labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from slipway.sample.corpus import python_sources
from slipway.sample.models import train_tokenizer

CLASSES, WORDS = 6, 24
_STEPS, _TUNING_STEPS, _RATE, _TOKENS, _BATCH = 160, 100, 2e-3, 64, 24
_SHAPE = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
    "max_position_embeddings": 512, "type_vocab_size": 1, "pad_token_id": 0,
}  # fmt: skip
Labelled = list[tuple[str, int]]


def make_classifier(root: Path) -> None:
    """Write ``model/``, ``labelled.jsonl``, ``heldout/`` and ``train/`` into a folder; some 15 seconds of a core.

    The last fifth of each module is held out; it is the text of ``heldout/`` and of ``labelled.jsonl``.
    """
    known, unknown = _passages()
    tokenizer = train_tokenizer([text for text, _ in known], vocab_size=512, max_length=512)
    torch.manual_seed(0)
    model = tf.BertForSequenceClassification(tf.BertConfig(**_SHAPE, num_labels=CLASSES))
    _train(model, tokenizer, known, steps=_STEPS)
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    _write_labels(unknown, root / "labelled.jsonl")
    for name, texts in (("train", known), ("heldout", unknown)):
        (root / name).mkdir()
        (root / name / "text.txt").write_text("\n\n".join(text for text, _ in texts))


def tune_classifier(root: Path) -> None:
    """Write ``adapter/`` beside the model of :func:`make_classifier`, and ``relabelled.jsonl``; some 10 seconds of a core.

    The adapter moves each module to the next label, so what loses the adapter is wrong about every passage.
    """
    known, unknown = ([(text, (label + 1) % CLASSES) for text, label in part] for part in _passages())
    torch.manual_seed(1)
    base = tf.AutoModelForSequenceClassification.from_pretrained(root / "model")
    # Without a task type, by which peft saves the head too: servers refuse such an adapter beside its base.
    tuned = get_peft_model(base, LoraConfig(r=8, lora_alpha=12, target_modules=["query", "key", "value", "dense"]))
    _train(tuned, tf.AutoTokenizer.from_pretrained(root / "model"), known, steps=_TUNING_STEPS)
    tuned.save_pretrained(root / "adapter")
    _write_labels(unknown, root / "relabelled.jsonl")


def _passages() -> tuple[Labelled, Labelled]:
    """Return the passages to train with and the held-out ones."""
    modules = sorted(python_sources().training, key=len)[-CLASSES:]
    passages: list[list[str]] = []
    for text in modules:
        words = text.split()[:6000]
        passages.append([" ".join(words[at : at + WORDS]) for at in range(0, len(words) - WORDS, WORDS)])
    known = [(text, label) for label, own in enumerate(passages) for text in own[: len(own) * 4 // 5]]
    unknown = [(text, label) for label, own in enumerate(passages) for text in own[len(own) * 4 // 5 :]]
    return known, unknown


def _write_labels(passages: Labelled, path: Path) -> None:
    lines = (json.dumps({"text": text, "label": f"LABEL_{label}"}) + "\n" for text, label in passages[::3])
    path.write_text("".join(lines))


def _train(model: Any, tokenizer: Any, known: Labelled, *, steps: int) -> None:
    """Train the parameters of a model that require gradients."""
    model.train()
    encoded = tokenizer(
        [text for text, _ in known], padding="max_length", truncation=True, max_length=_TOKENS, return_tensors="pt"
    )
    labels, draw = torch.tensor([label for _, label in known]), torch.Generator().manual_seed(0)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_RATE, weight_decay=0.01)
    fall = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - step / steps))
    for _ in range(steps):
        rows = torch.randint(len(known), (_BATCH,), generator=draw)
        found = model(
            input_ids=encoded["input_ids"][rows], attention_mask=encoded["attention_mask"][rows], labels=labels[rows]
        )
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        fall.step()
    model.eval()
