"""Translate or rewrite a text with this folder's ONNX model: ``python example.py "A house by the sea"``.

Needs ``pip install onnxruntime tokenizers numpy``. Without a ``tokenizer.json``, as translators of two vocabularies have none,
also ``transformers sentencepiece``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

HERE = Path(__file__).resolve().parent
DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def setting(name: str) -> Any:
    """Return a setting of generation, or of the model."""
    for file in ("generation_config.json", "config.json"):
        path = HERE / file
        found = json.loads(path.read_text(encoding="utf-8")).get(name) if path.is_file() else None
        if found is not None:
            return found
    return None


def first_token() -> int:
    """Return the token that the decoder's text begins with."""
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    return next((found for name in names if isinstance(found := setting(name), int)), 0)


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


def session(name: str, provider: str) -> Any:
    """Load a graph of this folder."""
    return onnxruntime.InferenceSession(str(HERE / name), providers=providers(provider))


def run(graph: Any, feed: dict[str, Any]) -> dict[str, Any]:
    """Run a graph; return its outputs by name."""
    names = [value.name for value in graph.get_outputs()]
    wanted = {value.name for value in graph.get_inputs()}
    return dict(zip(names, graph.run(names, {name: feed[name] for name in wanted}), strict=True))


def cached(results: dict[str, Any]) -> dict[str, Any]:
    """Return the keys and values of a call as inputs of the next one."""
    presents = {name: value for name, value in results.items() if name.startswith("present.")}
    return {name.replace("present.", "past_key_values."): value for name, value in presents.items()}


def fitted(row: list[int], graph: Any, name: str) -> Any:
    """Return a row in the shape of a graph's input: axes that are numbers are fixed, so that the row is padded and repeated to them."""
    shape = next((value.shape for value in graph.get_inputs() if value.name == name), ["batch", "sequence"])
    rows, length = (size if isinstance(size, int) else None for size in shape)
    if length is not None and len(row) > length:
        raise SystemExit(f"The text has {len(row)} tokens, and the model has room for {length}.")
    return np.array([row + [0] * ((length or len(row)) - len(row))] * (rows or 1), np.int64)


def generate(source: list[int], *, max_new_tokens: int, provider: str = "auto") -> list[int]:
    """Run the encoder once, then the decoder greedily, one call per token; without a cache it reads all tokens again each time."""
    encoder, decoder = (session(f"{name}_model.onnx", provider) for name in ("encoder", "decoder"))
    mask = fitted([1] * len(source), encoder, "attention_mask")
    encoded = run(encoder, {"input_ids": fitted(source, encoder, "input_ids"), "attention_mask": mask})
    cache = cached(encoded)  # keys and values of the source: they stay the same
    all_again = not cache
    cache["encoder_hidden_states"] = encoded["last_hidden_state"]
    for value in decoder.get_inputs():
        if value.name.startswith("past_key_values.") and ".decoder." in value.name:
            cache[value.name] = np.zeros((len(mask), value.shape[1], 0, value.shape[3]), DTYPES[value.type])
    ends = setting("eos_token_id")
    ends = set(ends) if isinstance(ends, list) else {ends}
    never = {setting("pad_token_id")} - {None} - ends
    start = new = first_token()
    generated: list[int] = []
    while len(generated) < max_new_tokens:
        tokens = [start, *generated] if all_again else [new]
        ids = fitted(tokens, decoder, "input_ids")
        results = run(decoder, {"input_ids": ids, "encoder_attention_mask": mask, **cache})
        cache |= cached(results)
        logits = results["logits"][0, len(tokens) - 1].astype(np.float32)
        logits[list(never)] = -np.inf
        new = int(logits.argmax())
        if new in ends:
            break
        generated.append(new)
    return generated


def tokenizer() -> tuple[Any, Any]:
    """Return functions from a text to its tokens and back."""
    if (HERE / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(HERE / "tokenizer.json"))
        return lambda text: fast.encode(text).ids, fast.decode
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(HERE, trust_remote_code=False)
    return lambda text: slow(text)["input_ids"], lambda tokens: slow.decode(tokens, skip_special_tokens=True)


def main() -> None:
    """Read the text from the command line; print the result."""
    parser = argparse.ArgumentParser(description="Translate or rewrite text with the ONNX model beside this file.")
    parser.add_argument("text", nargs="?", default="A house by the sea")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    parser.add_argument("--provider", choices=("auto", "cuda", "cpu"), default="auto")
    args = parser.parse_args()
    encode, decode = tokenizer()
    source = encode(args.text)
    if not source:
        parser.error("the text has no tokens")
    print(decode(generate(source, max_new_tokens=args.max_new_tokens, provider=args.provider)))


if __name__ == "__main__":
    main()
