"""Generate text with this folder's ONNX model, which has no KV cache: ``python example.py "Once upon a time"``.

Each call reads the whole text again. If the graph has fixed shapes, the text is padded on the right.

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
    """Continue a prompt greedily, one call per token."""
    inputs = {value.name: value for value in session.get_inputs()}
    rows, length = (size if isinstance(size, int) else None for size in inputs["input_ids"].shape)
    tokens, ends = list(prompt_ids), end_tokens()
    while len(tokens) < len(prompt_ids) + max_new_tokens and (length is None or len(tokens) <= length):
        size = length or len(tokens)
        known = {
            "input_ids": tokens,
            "attention_mask": [1] * len(tokens),
            "position_ids": list(range(len(tokens))),
        }
        feed = {
            name: np.array([known[name] + [0] * (size - len(tokens))] * (rows or 1), dtype=np.int64) for name in inputs
        }
        token = int(session.run(["logits"], feed)[0][0, len(tokens) - 1].argmax())
        if token in ends:
            break
        tokens.append(token)
    return tokens[len(prompt_ids) :]


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
