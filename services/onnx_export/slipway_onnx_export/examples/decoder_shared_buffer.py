"""Generate text with this folder's ONNX model: ``python example.py "Once upon a time"``.

Past and present keys and values are one buffer, into which each call writes those of its new tokens.

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
    """Continue a prompt greedily, one call per token, with all keys and values in buffers that are as long as the text can become."""
    inputs = {value.name: value for value in session.get_inputs()}
    room = len(prompt_ids) + max_new_tokens
    binding = session.io_binding()
    buffers = {}  # axes: batch, heads, tokens, width
    for name, value in inputs.items():
        if name.startswith("past_key_values."):
            empty = np.zeros((1, value.shape[1], room, value.shape[3]), dtype=DTYPES[value.type])
            buffers[name] = onnxruntime.OrtValue.ortvalue_from_numpy(empty)
            binding.bind_ortvalue_input(name, buffers[name])
            binding.bind_ortvalue_output(name.replace("past_key_values.", "present."), buffers[name])
    binding.bind_output("logits")  # the last one
    new, total, ends = list(prompt_ids), 0, end_tokens()
    generated: list[int] = []
    while len(generated) < max_new_tokens:
        positions = np.arange(total, total + len(new), dtype=np.int64)[None, :]
        total += len(new)
        feed = {
            "input_ids": np.array([new], dtype=np.int64),
            "attention_mask": np.ones((1, total), dtype=np.int64),  # it says how much of the buffers is filled
            "position_ids": positions,
        }
        for name, array in feed.items():
            if name in inputs:
                binding.bind_cpu_input(name, array)
        binding.bind_output("logits")  # again, because its shape changes
        session.run_with_iobinding(binding)
        token = int(binding.get_outputs()[-1].numpy()[0, -1].argmax())
        if token in ends:
            break
        generated.append(token)
        new = [token]
    return generated


DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def main() -> None:
    """Read the prompt from the command line; print prompt and continuation."""
    parser = argparse.ArgumentParser(description="Generate text with the ONNX model beside this file.")
    parser.add_argument("prompt", nargs="?", default="The")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    session = onnxruntime.InferenceSession(str(HERE / "model.onnx"), providers=["CPUExecutionProvider"])
    prompt_ids = tokenizer.encode(args.prompt).ids
    if not prompt_ids:
        parser.error("the prompt has no tokens")
    made = generate(session, prompt_ids, max_new_tokens=args.max_new_tokens)
    sound = any(tokenizer.token_to_id(token) is not None for token in OF_SOUND)
    print(made if sound else args.prompt + tokenizer.decode(made))


if __name__ == "__main__":
    main()
