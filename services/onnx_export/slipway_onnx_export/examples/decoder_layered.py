"""Generate text with this folder's graphs, one for each layer: ``python example.py "Once upon a time"``.

Needs ``pip install onnxruntime tokenizers numpy`` and nothing else. ``--one-at-a-time`` keeps one graph in memory, which is slow.
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


class Layers:
    """The graphs of this folder, run one after another: each takes what those before it gave."""

    def __init__(self, folder: Path, *, one_at_a_time: bool = False) -> None:
        layers = sorted(folder.glob("layer_*.onnx"))
        self._paths = [folder / "embedding.onnx", *layers, folder / "head.onnx"]
        self._sessions = {} if one_at_a_time else {path: self._load(path) for path in self._paths}

    def _load(self, path: Path) -> Any:
        return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def inputs(self) -> dict[str, Any]:
        """Return the inputs of all graphs by name."""
        return {value.name: value for path in self._paths for value in self._session(path).get_inputs()}

    def run(self, feed: dict[str, Any]) -> dict[str, Any]:
        """Run all graphs; return the logits and the cache."""
        found = dict(feed)
        for path in self._paths:
            session = self._session(path)
            outputs = [value.name for value in session.get_outputs()]
            given = {value.name: found[value.name] for value in session.get_inputs()}
            found.update(zip(outputs, session.run(outputs, given), strict=True))
            if "next_hidden_states" in found:
                found["hidden_states"] = found.pop("next_hidden_states")
        return {name: value for name, value in found.items() if name == "logits" or name.startswith("present.")}

    def _session(self, path: Path) -> Any:
        return self._sessions[path] if self._sessions else self._load(path)


def generate(layers: Layers, prompt_ids: list[int], *, max_new_tokens: int) -> list[int]:
    """Continue a prompt greedily, one call per token, with keys and values of earlier tokens in the cache."""
    inputs = layers.inputs()
    pasts = {name: value for name, value in inputs.items() if name.startswith("past_key_values.")}
    # Axes that vary have names. Where they are fixed, the last places of cache and call are filled, and the mask leaves the others out.
    rows, size = (axis if isinstance(axis, int) else None for axis in inputs["input_ids"].shape)
    places = next(value.shape[2] for value in pasts.values()) if size else None
    cache = {
        name: np.zeros((rows or 1, value.shape[1], places or 0, value.shape[3]), dtype=DTYPES[value.type])
        for name, value in pasts.items()
    }
    new, total, ends = list(prompt_ids), 0, end_tokens()
    generated: list[int] = []
    while len(generated) < max_new_tokens and (places is None or total <= places):
        piece, new = new[:size], new[size:] if size else []
        empty = [0] * (size - len(piece)) if size else []
        before = [0] * (places - total) + [1] * total if places is not None else [1] * total
        feed = {
            "input_ids": empty + piece,
            "attention_mask": before + empty + [1] * len(piece),
            "position_ids": empty + list(range(total, total + len(piece))),
        }
        results = layers.run(
            {name: np.array([row] * (rows or 1), dtype=np.int64) for name, row in feed.items()} | cache
        )
        total += len(piece)
        for name in pasts:
            present = results[name.replace("past_key_values.", "present.")]
            if places is not None:  # move up by the new tokens, and leave out the empty places between
                kept = [present[:, :, :places], present[:, :, places + len(empty) :]]
                present = np.concatenate(kept, axis=2)[:, :, -places:]
            cache[name] = present
        if new:  # the prompt goes on
            continue
        token = int(results["logits"][0, -1].argmax())
        if token in ends:
            break
        generated.append(token)
        new = [token]
    return generated


DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def main() -> None:
    """Read the prompt from the command line; print prompt and continuation."""
    parser = argparse.ArgumentParser(description="Generate text with the ONNX graphs beside this file.")
    parser.add_argument("prompt", nargs="?", default="The")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--one-at-a-time", action="store_true", help="load each graph when it runs")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    layers = Layers(HERE, one_at_a_time=args.one_at_a_time)
    prompt_ids = tokenizer.encode(args.prompt).ids
    if not prompt_ids:
        parser.error("the prompt has no tokens")
    made = generate(layers, prompt_ids, max_new_tokens=args.max_new_tokens)
    sound = any(tokenizer.token_to_id(token) is not None for token in OF_SOUND)
    print(made if sound else args.prompt + tokenizer.decode(made))


if __name__ == "__main__":
    main()
