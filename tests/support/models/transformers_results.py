"""What transformers computes with a folder of PyTorch weights, in the form in which transformers.js's pipelines say it."""

from __future__ import annotations

import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

TEXT = "g p in <mask> of the k"
CONTEXT = "the a of b is not in c"
"""A text, and where an answer is looked for."""
VARIED = {"max_new_tokens": 16, "do_sample": False, "no_repeat_ngram_size": 1}
"""Search of a text in which no token comes twice: a model with random weights would repeat one."""


def loaded(folder: Path) -> Any:
    config = tf.AutoConfig.from_pretrained(folder)
    return getattr(tf, config.architectures[0]).from_pretrained(folder, dtype=torch.float32).eval()


def continued(folder: Path, ids: list[int], count: int) -> list[int]:
    """Return what a decoder continues tokens with, greedily, each from the whole text again."""
    model, found = loaded(folder), list(ids)
    while len(found) < len(ids) + count:
        with torch.no_grad():
            found.append(int(model(input_ids=torch.tensor([found])).logits[0, -1].argmax()))
        if found[-1] == model.config.eos_token_id:
            return found[len(ids) : -1]
    return found[len(ids) :]


def result_for_text(folder: Path, text: str) -> Any:
    """Return the result of the pipeline of a model that answers questions, or writes another text."""
    tokenizer, model = tf.AutoTokenizer.from_pretrained(folder), loaded(folder)
    if type(model).__name__.endswith("QuestionAnswering"):
        return _answer(tokenizer, model, text)
    given = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(**given, **VARIED, num_beams=1)[0]
    return [{"generated_text": tokenizer.decode(tokens, skip_special_tokens=True)}]


def result_for_sound(folder: Path, path: Path, count: int) -> str:
    """Return the text of a WAV file, of so many tokens at most."""
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    extractor, tokenizer = tf.AutoFeatureExtractor.from_pretrained(folder), tf.AutoTokenizer.from_pretrained(folder)
    given = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt")
    tokens = _decoded(loaded(folder), {"input_features": given["input_features"]}, count)
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def write_sound(path: Path, seconds: float, rate: int = 16000) -> Path:
    """Write a tone that rises over noise."""
    at = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(7).normal(scale=0.02, size=at.shape)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        samples = 0.5 * np.sin(2 * np.pi * (200 + 900 * at) * at) + noise
        file.writeframes((samples * 30000).astype("<i2").tobytes())
    return path


def _decoded(model: Any, given: Mapping[str, Any], count: int) -> list[int]:
    """Decode greedily, all tokens again in each step."""
    tokens = [int(model.config.decoder_start_token_id)]
    while len(tokens) <= count and (len(tokens) == 1 or tokens[-1] != model.config.eos_token_id):
        with torch.no_grad():
            logits = model(**given, decoder_input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def _answer(tokenizer: Any, model: Any, question: str) -> dict[str, Any]:
    """Return the best span in the context, by the product of the chances of its start and its end."""
    given = tokenizer(question, CONTEXT, return_tensors="pt", return_token_type_ids=False)
    ids = given["input_ids"][0].tolist()
    with torch.no_grad():
        results = model(**given)
    outside = torch.tensor(
        [at <= ids.index(tokenizer.sep_token_id) or token in tokenizer.all_special_ids for at, token in enumerate(ids)]
    )
    outside[0] = False  # the first token takes part and is never the answer
    start, end = (
        results[name][0].masked_fill(outside, float("-inf")).softmax(-1) for name in ("start_logits", "end_logits")
    )
    start[0] = end[0] = 0
    chances = torch.triu(start[:, None] * end[None])
    first, last = divmod(int(chances.argmax()), len(ids))
    return {
        "answer": tokenizer.decode(ids[first : last + 1], skip_special_tokens=True),
        "score": float(chances.max()),
    }
