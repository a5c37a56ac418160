"""Train a small BERT that says from which module of Python's library a passage is, with its held-out passages and their labels."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers as tf

from slipway.sample.corpus import python_sources
from slipway.sample.tokenizer import train_tokenizer

CLASSES, WORDS = 6, 24
_STEPS, _RATE, _TOKENS, _BATCH = 160, 2e-3, 64, 24
_SHAPE = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
    "max_position_embeddings": 512, "type_vocab_size": 1, "pad_token_id": 0,
}  # fmt: skip


def make_classifier(root: Path) -> None:
    """Write ``model/``, ``labelled.jsonl``, ``heldout/`` and ``train/`` into a folder; some 15 seconds of a core.

    The last fifth of each module is held out; it is the text of ``heldout/`` and of ``labelled.jsonl``.
    """
    modules = sorted(python_sources().training, key=len)[-CLASSES:]
    passages: list[list[str]] = []
    for text in modules:
        words = text.split()[:6000]
        passages.append([" ".join(words[at : at + WORDS]) for at in range(0, len(words) - WORDS, WORDS)])
    known = [(text, label) for label, own in enumerate(passages) for text in own[: len(own) * 4 // 5]]
    unknown = [(text, label) for label, own in enumerate(passages) for text in own[len(own) * 4 // 5 :]]
    tokenizer = train_tokenizer([text for text, _ in known], vocab_size=512, max_length=512)
    model = _train(tokenizer, known)
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    lines = (json.dumps({"text": text, "label": f"LABEL_{label}"}) + "\n" for text, label in unknown[::3])
    (root / "labelled.jsonl").write_text("".join(lines))
    for name, texts in (("train", known), ("heldout", unknown)):
        (root / name).mkdir()
        (root / name / "text.txt").write_text("\n\n".join(text for text, _ in texts))


def _train(tokenizer: tf.PreTrainedTokenizerFast, known: list[tuple[str, int]]) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    model = tf.BertForSequenceClassification(tf.BertConfig(**_SHAPE, num_labels=CLASSES)).train()
    encoded = tokenizer(
        [text for text, _ in known], padding="max_length", truncation=True, max_length=_TOKENS, return_tensors="pt"
    )
    labels, draw = torch.tensor([label for _, label in known]), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01)
    fall = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - step / _STEPS))
    for _ in range(_STEPS):
        rows = torch.randint(len(known), (_BATCH,), generator=draw)
        found = model(encoded["input_ids"][rows], attention_mask=encoded["attention_mask"][rows], labels=labels[rows])
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        fall.step()
    return model.eval()
