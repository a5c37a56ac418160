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

    def empty_cache(self, rows: int) -> dict[str, Any]:
        """Return the cache before the first token. Each tensor: (rows, heads, 0, size)."""
        inputs = [value for path in self._paths for value in self._session(path).get_inputs()]
        return {
            value.name: np.zeros((rows, value.shape[1], 0, value.shape[3]), dtype=DTYPES[value.type])
            for value in inputs
            if value.name.startswith("past_key_values.")
        }

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
    cache = layers.empty_cache(1)
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
        results = layers.run(feed)
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
    print(args.prompt + tokenizer.decode(generate(layers, prompt_ids, max_new_tokens=args.max_new_tokens)))


if __name__ == "__main__":
    main()
