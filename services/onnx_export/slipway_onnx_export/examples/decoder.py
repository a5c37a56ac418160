"""Generate text with this folder's ONNX model: ``python example.py "Once upon a time"``.

Needs ``pip install onnxruntime tokenizers numpy`` and nothing else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
OF_SOUND = ("<custom_token_999>", "<|bicodec_semantic_999|>", "<|s_999|>", "<|speech_999|>", "<|c1_999|>")
"""Tokens of codecs of sound: their numbers are printed, which a codec takes, and no text."""


def end_tokens() -> set[int]:
    """Return the token ids that end generation."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = HERE / name
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        ids.update([found] if isinstance(found, int) else found or [])
    return ids


def generate(session: Any, prompt_ids: list[int], *, max_new_tokens: int) -> list[int]:
    """Continue a prompt greedily, one call per token, with keys, values and states of earlier tokens in the cache."""
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    # No keys and values yet, and states of zeros.
    cache: dict[str, Any] = {
        name: np.zeros((1, *(size if isinstance(size, int) else 0 for size in value.shape[1:])), DTYPES[value.type])
        for name, value in inputs.items()
        if name.startswith("past_key_values.")
    }
    new, total, ends = list(prompt_ids), 0, end_tokens()
    generated: list[int] = []
    while len(generated) < max_new_tokens:
        positions = np.arange(total, total + len(new), dtype=np.int64)[None, :]
        total += len(new)
        feed = {
            "input_ids": np.array([new], dtype=np.int64),
            "attention_mask": np.ones((1, total), dtype=np.int64),
            "position_ids": positions,
            **cache,
        }
        feed = {name: value for name, value in feed.items() if name in inputs}
        results = dict(zip(outputs, session.run(outputs, feed), strict=True))
        token = int(results["logits"][0, -1].argmax())
        if token in ends:
            break
        generated.append(token)
        new = [token]
        cache = {
            name.replace("present.", "past_key_values."): value
            for name, value in results.items()
            if name.startswith("present.")
        }
    return generated


DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


CUDA = (
    "CUDAExecutionProvider",
    # Products of float32 keep 24 bits, as in the export's comparison; and memory grows by what is needed, not by doubling.
    {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"},
)


def providers(choice: str) -> list[Any]:
    """Return the execution providers with their options: CUDA where this build of onnxruntime has it, unless the CPU is asked for."""
    has = CUDA[0] in onnxruntime.get_available_providers()
    if choice == "cuda" and not has:
        raise SystemExit(
            "This onnxruntime has no CUDA provider: pip uninstall onnxruntime, pip install onnxruntime-gpu."
        )
    return [*([CUDA] if has and choice != "cpu" else []), "CPUExecutionProvider"]


def main() -> None:
    """Read the prompt from the command line; print prompt and continuation."""
    parser = argparse.ArgumentParser(description="Generate text with the ONNX model beside this file.")
    parser.add_argument("prompt", nargs="?", default="The")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--provider", choices=("auto", "cuda", "cpu"), default="auto")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    session = onnxruntime.InferenceSession(str(HERE / "model.onnx"), providers=providers(args.provider))
    prompt_ids = tokenizer.encode(args.prompt).ids
    if not prompt_ids:
        parser.error("the prompt has no tokens")
    made = generate(session, prompt_ids, max_new_tokens=args.max_new_tokens)
    sound = any(tokenizer.token_to_id(token) is not None for token in OF_SOUND)
    print(made if sound else args.prompt + tokenizer.decode(made))


if __name__ == "__main__":
    main()
