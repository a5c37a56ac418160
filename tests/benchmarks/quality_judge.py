"""How far rounded weights take a model of ``bench_quality.py`` from itself, on text that nothing was fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from quality_models import Subject
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]
HEAD = "lm_head.weight"


def calibrated(out: Path) -> Weights:
    """Return the weights that the codes of ``slipway stage calibrate`` stand for."""
    found = load_file(out / "calibration" / "weights.safetensors")
    made = {}
    for name in [name.removesuffix(".codes") for name in found if name.endswith(".codes")]:
        codes, scales = found[f"{name}.codes"].float(), found[f"{name}.scales"]
        made[name] = codes * scales.repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)
    return made


class Judge:
    """Compares a model with rounded weights with the exact one: mean Kullback–Leibler divergence in nats, top-1 agreement.

    Args:
        subject: The model and its held-out windows.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._exact = self._results({}, embedding=False)

    def compare(self, weights: Mapping[str, torch.Tensor], *, embedding: bool = False) -> tuple[float, float]:
        """Compare by transformers in float32; with ``embedding`` the head's weight is the embedding's too."""
        return self._compared(self._results(weights, embedding=embedding))

    def compare_graph(self, graph: Path) -> tuple[float, float]:
        """Compare the graph of a decoder, run by ONNX Runtime with an empty cache."""
        import onnxruntime as ort

        session = ort.InferenceSession(graph)
        windows = self._subject.heldout
        config = tf.AutoConfig.from_pretrained(self._subject.source)
        made = [session.run(["logits"], _inputs(session, part.numpy(), config))[0] for part in windows.split(16)]
        return self._compared(torch.from_numpy(np.concatenate(made)).float().log_softmax(-1))

    def _compared(self, other: torch.Tensor) -> tuple[float, float]:
        divergence = (self._exact.exp() * (self._exact - other)).sum(-1).mean()
        return float(divergence), float((self._exact.argmax(-1) == other.argmax(-1)).float().mean())

    @torch.no_grad()
    def _results(self, weights: Mapping[str, torch.Tensor], *, embedding: bool) -> torch.Tensor:
        subject = self._subject
        model = getattr(tf, subject.auto_class).from_pretrained(subject.source, dtype=torch.float32).eval()
        head = model.get_output_embeddings()
        if head is not None and not embedding:
            head.weight = torch.nn.Parameter(head.weight.detach().clone())  # untied
        for name, value in weights.items():
            model.get_parameter(name).data = value
        if embedding and HEAD in weights:
            model.get_input_embeddings().weight.data = weights[HEAD]
        return torch.cat([model(part).logits.log_softmax(-1) for part in subject.heldout.split(16)])


def _inputs(session: Any, tokens: Any, config: Any) -> dict[str, Any]:
    """Return the inputs of a decoder's graph: tokens, all of them visible, and no past."""
    made = {}
    for wanted in session.get_inputs():
        if wanted.name == "input_ids":
            made[wanted.name] = tokens.astype(np.int64)
        elif wanted.name == "attention_mask":
            made[wanted.name] = np.ones_like(tokens, np.int64)
        elif wanted.name == "position_ids":
            made[wanted.name] = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).astype(np.int64)
        else:  # past_key_values.N.key|value: (batch, heads, past, width), where heads and width may only be named
            dtype = np.float16 if "16" in wanted.type else np.float32
            width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            made[wanted.name] = np.zeros((len(tokens), config.num_key_value_heads, 0, width), dtype)
    return made
