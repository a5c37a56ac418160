"""Transcribe sound with this folder's ONNX model: ``python example.py sound.wav``.

Needs ``pip install onnxruntime transformers numpy``. The sound is a WAV file of 16-bit samples; without one, a second of silence.
"""

from __future__ import annotations

import argparse
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from transformers import AutoFeatureExtractor, AutoTokenizer

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


def generate(features: Any, *, max_new_tokens: int, provider: str = "auto") -> list[int]:
    """Run the encoder once, then the decoder greedily, one call per token. features: (1, mel bins, frames), or samples (1, samples).

    Without a cache, the decoder reads all tokens again each time.
    """
    encoder, decoder = (session(f"{name}_model.onnx", provider) for name in ("encoder", "decoder"))
    wanted = encoder.get_inputs()[0]
    rows = wanted.shape[0] if isinstance(wanted.shape[0], int) else 1
    mask = np.ones((rows, features.shape[-1]), np.int64)  # for graphs that take samples of any number
    encoded = run(
        encoder, {wanted.name: features.astype(DTYPES[wanted.type]).repeat(rows, axis=0), "attention_mask": mask}
    )
    cache = cached(encoded)  # those of the sound stay the same
    all_again = not cache
    cache["encoder_hidden_states"] = encoded["last_hidden_state"]
    for value in decoder.get_inputs():
        if value.name.startswith("past_key_values.") and ".decoder." in value.name:
            cache[value.name] = np.zeros((rows, value.shape[1], 0, value.shape[3]), DTYPES[value.type])
    ends = setting("eos_token_id")
    ends = set(ends) if isinstance(ends, list) else {ends}
    forced = [token for _, token in sorted(setting("forced_decoder_ids") or []) if token is not None]
    start = new = [first_token(), *forced]
    generated: list[int] = []
    while len(generated) < max_new_tokens:
        tokens = start + generated if all_again else new
        ids = fitted(tokens, decoder, "input_ids")
        results = run(decoder, {"input_ids": ids, "encoder_attention_mask": mask, **cache})
        cache |= cached(results)
        new = [int(results["logits"][0, len(tokens) - 1].argmax())]
        if new[0] in ends:
            break
        generated += new
    return generated


def read_sound(path: Path | None, rate: int) -> Any:
    """Return the samples of a file, at the model's rate."""
    if path is None:
        return np.zeros(rate, np.float32)
    with wave.open(str(path)) as file:
        if file.getframerate() != rate or file.getsampwidth() != 2:
            raise SystemExit(
                f"{path} has {file.getframerate()} samples a second of {8 * file.getsampwidth()} bits: convert it to {rate} of 16 bits."
            )
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).reshape(-1, file.getnchannels())
    return samples.mean(axis=1).astype(np.float32) / 32768


def main() -> None:
    """Read the file from the command line; print its text."""
    parser = argparse.ArgumentParser(description="Transcribe sound with the ONNX model beside this file.")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--provider", choices=("auto", "cuda", "cpu"), default="auto")
    args = parser.parse_args()
    extractor = AutoFeatureExtractor.from_pretrained(HERE, trust_remote_code=False)
    sound = read_sound(args.file, extractor.sampling_rate)
    features = extractor(sound, sampling_rate=extractor.sampling_rate, return_tensors="np")
    tokenizer = AutoTokenizer.from_pretrained(HERE, trust_remote_code=False)
    tokens = generate(
        features[extractor.model_input_names[0]], max_new_tokens=args.max_new_tokens, provider=args.provider
    )
    print(tokenizer.decode(tokens, skip_special_tokens=True))


if __name__ == "__main__":
    main()
