"""Tiny models for quantization, and ways to run the results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 512


def save_tiny(folder: Path, *, dtype: torch.dtype = torch.float32, tied: bool = True, **changes: Any) -> Path:
    """Save a random two-layer Qwen3 with transformers."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes}, tie_word_embeddings=tied)).eval()
    model.to(dtype).save_pretrained(folder)
    return folder


def prompt(batch: int = 2, sequence: int = 9) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCABULARY, (batch, sequence))


def torch_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def onnx_session(folder: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def onnx_step(session: ort.InferenceSession, tokens: np.ndarray, past: dict[str, np.ndarray] | None = None) -> Any:
    """Run one call; return (logits, past for the next call)."""
    batch, sequence = tokens.shape
    length = next(iter(past.values())).shape[2] if past else 0
    feeds: dict[str, np.ndarray] = {
        "input_ids": tokens,
        "attention_mask": np.ones((batch, length + sequence), np.int64),
        "position_ids": np.tile(np.arange(length, length + sequence), (batch, 1)),
    }
    for wanted in session.get_inputs():
        if wanted.name.startswith("past_key_values."):
            dtype = np.float16 if wanted.type == "tensor(float16)" else np.float32
            empty = np.zeros((batch, wanted.shape[1], 0, wanted.shape[3]), dtype)
            feeds[wanted.name] = past[wanted.name] if past else empty
    names = [output.name for output in session.get_outputs()]
    wanted_names = {value.name for value in session.get_inputs()}
    outputs = dict(zip(names, session.run(names, {k: v for k, v in feeds.items() if k in wanted_names}), strict=True))
    following = {name.replace("present", "past_key_values"): v for name, v in outputs.items() if name != "logits"}
    return outputs["logits"].astype(np.float32), following


def onnx_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    return onnx_step(onnx_session(folder), tokens)[0]


def divergence(reference: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return mean KL divergence in nats, and top-1 agreement. reference, other: logits (batch, sequence, vocabulary)."""
    p = torch.log_softmax(torch.from_numpy(reference), -1)
    q = torch.log_softmax(torch.from_numpy(other), -1)
    agreement = (p.argmax(-1) == q.argmax(-1)).float().mean()
    return float((p.exp() * (p - q)).sum(-1).mean()), float(agreement)


def scale_features(source: Path, target: Path, *, layer: int, feature: int, by: float) -> Path:
    """Copy a model with one feature of an MLP scaled up and down again: it computes the same, with an outlier between."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    weights[f"model.layers.{layer}.mlp.up_proj.weight"][feature] *= by
    weights[f"model.layers.{layer}.mlp.down_proj.weight"][:, feature] /= by
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target
