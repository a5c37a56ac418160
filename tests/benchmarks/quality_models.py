"""The models of ``bench_quality.py``: a real one, and three that are trained here in about a minute each, with the same weights for the same libraries and threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from slipway.configuration.calibration import SAMPLE_OF_RUN
from slipway.model.runs.checkpoints import find_checkpoint
from slipway.sample import make_sample
from slipway.sample.corpus import documentation, python_sources
from slipway.sample.models import token_stream, train_tokenizer
from slipway.sample.real import RealRecipe, make_real_sample
from slipway.sample.real.making import render_conversations
from slipway.settings import Settings

SLIPWAY = Path(sys.executable).with_name("slipway")
WINDOWS, TOKENS = 64, 128
_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "dtype": "float32",
}
_STEPS, _RATE = 400, 1e-3
_PASSAGE = 96
"""Tokens of a passage that the classifier reads."""


@dataclass(frozen=True)
class Subject:
    """A model to quantize.

    Attributes:
        source: Its folder.
        data: Text to calibrate with, as ``slipway stage calibrate`` takes it.
        heldout: Windows that neither training nor calibration has seen. (windows, tokens)
        auto_class: The class of transformers that loads it.
        described: What it is, in a line.
    """

    source: Path
    data: Path
    heldout: torch.Tensor
    auto_class: str
    described: str


def sample(root: Path, made: Path | None) -> Subject:
    """Merge the sample of ``slipway sample``, trained first if it is not given; text of the adapter's training."""
    if made is None:
        made = root / "sample"
        make_sample(made)
    source = _merged(made / "qwen3-base", made / "qwen3-finetuned", root / "merged")
    tokenizer = tf.AutoTokenizer.from_pretrained(source)
    heldout = _windows(tokenizer((made / "heldout" / "heldout.txt").read_text(encoding="utf-8"))["input_ids"])
    data = _write(root / "data", python_sources().training)
    return Subject(source, data, heldout, "AutoModelForCausalLM", "Qwen3 with its adapter, tied head")


def smollm2(root: Path, made: Path | None) -> Subject:
    """Merge SmolLM2 off its grid with its LoRA (``slipway sample --real --off-grid``), made first if it is not given."""
    recipe = RealRecipe(off_grid=True)
    if made is None:
        made = root / "sample"
        make_real_sample(made, home=Settings.from_environment(os.environ).home, recipe=recipe)
    source = _merged(made / recipe.base_name, made / "run", root / "merged")
    tokenizer = tf.AutoTokenizer.from_pretrained(source)
    texts = (path.read_text(encoding="utf-8") for path in sorted((made / "heldout").glob("*.txt")))
    tokens = [tokenizer(text)["input_ids"][:TOKENS] for text in texts]
    heldout = torch.tensor([each for each in tokens if len(each) == TOKENS])
    lines = (made / "run" / SAMPLE_OF_RUN).read_text(encoding="utf-8").splitlines()
    data = _write(root / "data", render_conversations(tokenizer, [json.loads(line)["messages"] for line in lines]))
    return Subject(
        source, data, heldout, "AutoModelForCausalLM", "SmolLM2-135M-Instruct off its grid with its adapter, tied head"
    )


def _merged(base: Path, run: Path, out: Path) -> Path:
    """Merge the newest checkpoint of a run; return the model's folder."""
    inputs = ["--input", f"base={base}", "--input", f"adapter={find_checkpoint(run).path}"]
    subprocess.run([SLIPWAY, "stage", "merge", *inputs, "--out", out], check=True, stdout=subprocess.DEVNULL)
    return out / "pytorch"


def llama(root: Path, _: Path | None = None) -> Subject:
    """Train a Llama with a head of its own on documentation and sources of Python."""
    texts = (*documentation().training, *python_sources().training)
    tokenizer = train_tokenizer(texts, vocab_size=_SHAPE["vocab_size"], max_length=_SHAPE["max_position_embeddings"])
    config = tf.LlamaConfig(**_SHAPE, intermediate_size=512, num_key_value_heads=2, tie_word_embeddings=False)
    stream = torch.tensor(token_stream(tokenizer, texts))

    def batch(draw: torch.Generator) -> dict[str, torch.Tensor]:
        starts = torch.randint(len(stream) - TOKENS, (8, 1), generator=draw)
        windows = stream[starts + torch.arange(TOKENS)]
        return {"input_ids": windows, "labels": windows}

    source = _train(tf.LlamaForCausalLM, config, tokenizer, batch, folder=root / "llama")
    heldout = _windows(token_stream(tokenizer, python_sources().heldout))
    data = _write(root / "data", python_sources().training)
    return Subject(source, data, heldout, "AutoModelForCausalLM", "Llama, head of its own")


def bert(root: Path, _: Path | None = None) -> Subject:
    """Train a BERT that says of which module of Python's library a passage is; the last fifth of each module is held out."""
    modules = python_sources().training
    tokenizer = train_tokenizer(modules, vocab_size=_SHAPE["vocab_size"], max_length=_SHAPE["max_position_embeddings"])
    passages, labels, heldout = [], [], []
    for label, text in enumerate(modules):
        found = torch.tensor(token_stream(tokenizer, [text]))
        found = found[: len(found) // _PASSAGE * _PASSAGE].reshape(-1, _PASSAGE)
        cut = len(found) * 4 // 5
        passages.append(found[:cut])
        heldout.append(found[cut:])
        labels += [label] * cut
    known, classes, unknown = torch.cat(passages), torch.tensor(labels), torch.cat(heldout)

    def batch(draw: torch.Generator) -> dict[str, torch.Tensor]:
        rows = torch.randint(len(known), (24,), generator=draw)
        return {"input_ids": known[rows], "labels": classes[rows]}

    config = tf.BertConfig(**_SHAPE, intermediate_size=1024, num_labels=len(modules))
    source = _train(tf.BertForSequenceClassification, config, tokenizer, batch, folder=root / "bert")
    data = _write(root / "data", tokenizer.batch_decode(known))
    spread = torch.linspace(0, len(unknown) - 1, 4 * WINDOWS).long()
    described = f"BERT, {len(modules)} classes"
    return Subject(source, data, unknown[spread], "AutoModelForSequenceClassification", described)


SUBJECTS = {"smollm2": smollm2, "sample": sample, "llama": llama, "bert": bert}


def _train(kind: Any, config: Any, tokenizer: Any, batch: Any, *, folder: Path) -> Path:
    """Train a model of random weights by AdamW, with rates that fall linearly, and save it."""
    torch.manual_seed(0)
    model, draw = kind(config), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    fall = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - step / _STEPS))
    model.train()
    for _ in range(_STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch(draw)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        fall.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _windows(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ids[: WINDOWS * TOKENS]).reshape(WINDOWS, TOKENS)


def _write(folder: Path, texts: Sequence[str]) -> Path:
    folder.mkdir()
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "calibration.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "profile.json").write_text("{}")
    return folder
