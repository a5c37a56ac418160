"""Decode one text by each runtime in the same way, and compare it with PyTorch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from slipway.proof.numerics import Logits
from slipway.proof.runtime import Bounds, LanguageModel, Past, Step
from slipway.validation.speed import Engine

PROMPT, STEPS, ROUNDS = 128, 48, 3
"""Tokens of the prompt, tokens after it, one by one, and rounds, of which the first warms up."""


@dataclass(frozen=True)
class Decoded:
    """What a model said, and how quickly.

    Attributes:
        logits: After the prompt and after each token, (1 + steps, V).
        prefill_ms: Median time of the call with the prompt, milliseconds.
        step_ms: Median time of a call with one token.
    """

    logits: npt.NDArray[np.float32]
    prefill_ms: float
    step_ms: float

    @property
    def tokens(self) -> list[int]:
        """Return the likeliest token after the prompt and after each token."""
        return [int(token) for token in self.logits.argmax(-1)]


class TorchModel(LanguageModel):
    """A decoder's folder in PyTorch, with its KV cache on the device."""

    has_cache = True
    bounds = Bounds()

    def __init__(self, folder: Path, *, dtype: str, device: str = "cuda") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.backends.cuda.matmul.allow_tf32 = False
        self._torch, self.native_dtype, self.device = torch, dtype, device
        types = {"stored_dtype": dtype, "compute_dtype": dtype, "native_dtype": dtype}
        self.engine = Engine(runtime="pytorch", version=torch.__version__, provider=device, **types)
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), trust_remote_code=False)
        self._module = module.eval().to(device)

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`."""
        named = {name: getattr(step, name) for name in ("input_ids", "attention_mask", "position_ids")}
        given = {name: self._torch.from_numpy(value).to(self.device) for name, value in named.items()}
        with self._torch.inference_mode():
            result = self._module(**given, past_key_values=step.past, use_cache=True)
        return result.logits.float().cpu().numpy(), result.past_key_values


def decode(
    model: LanguageModel, prompt: Sequence[int], follow: Sequence[int] = (), *, steps: int = STEPS, rounds: int = ROUNDS
) -> Decoded:
    """Decode tokens after the prompt: those of ``follow``, or the model's own. Results are those of the last round."""
    first, later = list[float](), list[float]()
    for _ in range(rounds):
        rows, past, seen, new = list[Any](), None, list(prompt), list(prompt)
        for index in range(steps + 1):
            began = time.perf_counter()
            logits, past = model.forward(_step(seen, new, past))
            (later if index else first).append(1000 * (time.perf_counter() - began))
            rows.append(logits[0, -1])
            new = [follow[index] if index < len(follow) else int(rows[-1].argmax())]
            seen = [*seen, *new]
    warm = 1 if rounds > 1 else 0
    return Decoded(np.stack(rows), median(first[warm:]), median(later[warm * steps :] or [0.0]))


def _step(seen: Sequence[int], new: Sequence[int], past: Past) -> Step:
    positions = np.arange(len(seen) - len(new), len(seen))[None]
    return Step(np.array([new]), np.ones((1, len(seen)), dtype=np.int64), positions, past)


def agreement(one: Decoded, reference: Decoded) -> dict[str, float]:
    """Return the mean KL divergence (nats) of the reference from one, and the share of tokens that both find likeliest."""
    p, q = (_log_softmax(each.logits.astype(np.float64)) for each in (reference, one))
    same = [a == b for a, b in zip(one.tokens, reference.tokens, strict=True)]
    return {"kl": float((np.exp(p) * (p - q)).sum(-1).mean()), "same_tokens": sum(same) / len(same)}


def _log_softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = values - values.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
