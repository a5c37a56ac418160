"""Classify a text, or compute its embedding, with this folder's ONNX model: ``python example.py "A house by the sea"``.

Needs ``pip install onnxruntime tokenizers numpy`` and nothing else. A model that finds answers takes ``--question``; one that
gives vectors takes another text with ``--compare``. Prompts that such a model was trained with are put before the texts by their names:
``python example.py "How old are you?" --prompt query --compare "I am thirty." --compare-prompt document``. Without a name, the model's default
prompt is, if it has one.
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


FILL = {"input_ids": int(json.loads((HERE / "config.json").read_text(encoding="utf-8")).get("pad_token_id") or 0)}


def fitted(row: list[int], shape: list[Any], fill: int) -> Any:
    """Return a row in the graph's shape: axes that are numbers are fixed, so that the row is padded and repeated to them."""
    rows, length = (size if isinstance(size, int) else None for size in shape)
    if length is not None and len(row) > length:
        raise SystemExit(f"The text has {len(row)} tokens, and the model has room for {length}.")
    padded = row + [fill] * ((length or len(row)) - len(row))
    return np.array([padded] * (rows or 1), np.int64)


def show(results: dict[str, Any], encoding: Any, tokenizer: Any) -> None:
    """Print what the model gives for a text."""
    config = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
    architecture = config["architectures"][0]
    labels = config.get("id2label") or {}
    if "start_logits" in results:
        start, end = (int(results[name][0].argmax()) for name in ("start_logits", "end_logits"))
        print(tokenizer.decode(encoding.ids[start : end + 1]))
    elif "last_hidden_state" in results:
        print(" ".join(f"{value:.4f}" for value in vector(results, encoding)))
    elif "MaskedLM" in architecture:
        print(tokenizer.decode([int(token) for token in results["logits"][0].argmax(-1)]))
    elif results["logits"].ndim == 3:
        for token, label in zip(encoding.tokens, results["logits"][0].argmax(-1), strict=True):
            print(token, labels.get(str(label), label))
    else:
        logits = results["logits"][0].astype(np.float32)
        if len(logits) == 1:
            print(float(logits[0]))
            return
        several = config.get("problem_type") == "multi_label_classification"
        chances = (
            1 / (1 + np.exp(-logits))
            if several
            else np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        )
        for index in chances.argsort()[::-1]:
            print(labels.get(str(index), index), f"{chances[index]:.3f}")


def vector(results: dict[str, Any], encoding: Any) -> Any:
    """Return the vector of a text: the model's own, otherwise the mean of its tokens."""
    if "sentence_embedding" in results:
        return results["sentence_embedding"][0]
    return results["last_hidden_state"][0][np.array(encoding.attention_mask, bool)].mean(axis=0)


def read_prompts() -> tuple[dict[str, str], str]:
    """Return the model's prompts by name, and the name of the one that every text gets; none for other models."""
    path = HERE / "config_sentence_transformers.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    prompts = {name: text or "" for name, text in (settings.get("prompts") or {}).items()}
    return prompts, settings.get("default_prompt_name") or ""


def run(session: Any, encoding: Any) -> dict[str, Any]:
    """Run the graph on a text; return its outputs by name, without the places that the text leaves empty."""
    known = {"input_ids": encoding.ids, "attention_mask": encoding.attention_mask, "token_type_ids": encoding.type_ids}
    names = [value.name for value in session.get_outputs()]
    feed = {
        value.name: fitted(known[value.name], value.shape, FILL.get(value.name, 0)) for value in session.get_inputs()
    }
    results = dict(zip(names, session.run(names, feed), strict=True))
    length = session.get_inputs()[0].shape[1]
    for name, value in results.items():
        if value.ndim > 1 and isinstance(length, int) and value.shape[1] == length and "pooler" not in name:
            results[name] = value[:, : len(encoding.ids)]
    return results


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
    """Read the text from the command line; print the result."""
    parser = argparse.ArgumentParser(description="Run the ONNX model beside this file on a text.")
    parser.add_argument("text", nargs="?", default="A house by the sea")
    parser.add_argument("--question", help="a question about the text, for a model that finds answers")
    parser.add_argument("--compare", help="another text, for a model that gives vectors: print how similar the two are")
    prompts, default = read_prompts()
    for name, which in (("--prompt", "the text"), ("--compare-prompt", "the other text")):
        parser.add_argument(
            name,
            choices=sorted(prompts),
            default=default,
            help=f"name of the model's prompt that is put before {which}",
        )
    parser.add_argument("--provider", choices=("auto", "cuda", "cpu"), default="auto")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    words = prompts.get(args.prompt, "") + args.text
    encoding = tokenizer.encode(args.question, words) if args.question else tokenizer.encode(words)
    if not encoding.ids:
        parser.error("the text has no tokens")
    session = onnxruntime.InferenceSession(str(HERE / "model.onnx"), providers=providers(args.provider))
    results = run(session, encoding)
    if args.compare:
        other = tokenizer.encode(prompts.get(args.compare_prompt, "") + args.compare)
        first, second = vector(results, encoding), vector(run(session, other), other)
        print(f"{first @ second / np.linalg.norm(first) / np.linalg.norm(second):.4f}")
        return
    show(results, encoding, tokenizer)


if __name__ == "__main__":
    main()
