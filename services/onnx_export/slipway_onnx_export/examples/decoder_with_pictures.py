"""Generate text with this folder's ONNX models, of a picture too: ``python example.py "Once upon a time"``.

``python example.py "What is this?" --picture picture.npz`` takes a picture as arrays: the inputs of ``vision_encoder.onnx`` by their names,
and ``input_ids`` if they are known; then those are the prompt. The model's processor makes them, where transformers is installed::

    made = AutoProcessor.from_pretrained(".").apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="np",
                                                                  add_generation_prompt=True)
    numpy.savez("picture.npz", **made)

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
CONFIG = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
IMAGE = CONFIG.get("image_token_id", CONFIG.get("image_token_index"))
TYPES = ("token_type_ids", "mm_token_type_ids")
DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
CUDA = (
    "CUDAExecutionProvider",
    # Products of float32 keep 24 bits, as in the export's comparison; and memory grows by what is needed, not by doubling.
    {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"},
)


class Graph:
    """A graph of this folder, which takes and returns arrays by name."""

    def __init__(self, name: str, providers: list[Any]) -> None:
        self._session = onnxruntime.InferenceSession(str(HERE / name), providers=providers)
        self.inputs = {value.name: value for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    def run(self, values: dict[str, Any]) -> dict[str, Any]:
        """Run the graph; values that it does not take are left out."""
        feed = {name: values[name].astype(DTYPES[each.type]) for name, each in self.inputs.items()}
        return dict(zip(self._outputs, self._session.run(self._outputs, feed), strict=True))

    def zeros(self, prefix: str, *, free: int) -> dict[str, Any]:
        """Return zeros for the inputs whose names begin with a prefix, with so many places where an axis varies; one row of a cache."""
        made = {}
        for name, value in self.inputs.items():
            if name.startswith(prefix):
                sizes = [size if isinstance(size, int) else free for size in value.shape]
                made[name] = np.zeros((1, *sizes[1:]) if prefix == "past_key_values." else sizes, DTYPES[value.type])
        return made


def calls_of(picture: dict[str, Any], encoder: Graph) -> list[dict[str, Any]]:
    """Return the encoder's inputs for each call: all pictures at once, or one after another and without padding, where it takes one."""
    shape = encoder.inputs["pixel_values"].shape
    if shape[0] != 1 or len(shape) == 5:
        return [picture]
    calls = []
    for number in range(len(picture["pixel_values"])):
        one = {name: each[number : number + 1] for name, each in picture.items()}
        if "image_sizes" in one:
            height, width = one["image_sizes"][0]
            one["pixel_values"] = one["pixel_values"][..., :height, :width]
        if "spatial_shapes" in one:
            one["pixel_values"] = one["pixel_values"][:, : one["spatial_shapes"][0].prod()]
        if "image_position_ids" in one:
            real = (one["image_position_ids"][0] >= 0).all(axis=-1)
            one |= {name: one[name][:, real] for name in ("pixel_values", "image_position_ids")}
        calls.append(one)
    return calls


def end_tokens() -> set[int]:
    """Return the token ids that end generation."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = HERE / name
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        ids.update([found] if isinstance(found, int) else found or [])
    return ids


def positions_of(ids: list[int], picture: dict[str, Any], *, thrice: bool) -> Any:
    """Return the positions of a prompt: one number for each token, or time, row and column, which Qwen counts within pictures."""
    if not thrice:
        return np.arange(len(ids), dtype=np.int64)[None]
    merge = CONFIG["vision_config"].get("spatial_merge_size", 2)
    grids = iter([(rows // merge, columns // merge) for _, rows, columns in picture.get("image_grid_thw", ())])
    positions, at, place = np.zeros((3, 1, len(ids)), np.int64), 0, 0
    while at < len(ids):
        down, across = next(grids, (1, 1)) if ids[at] == IMAGE else (1, 1)
        for number in range(down * across):
            positions[:, 0, at + number] = place, place + number // across, place + number % across
        at, place = at + down * across, place + max(down, across)
    return positions


def generate(prompt: list[int], picture: dict[str, Any], *, graphs: dict[str, Graph], max_new_tokens: int) -> list[int]:
    """Continue a prompt greedily, one call per token, with keys, values and states of earlier tokens in the cache."""
    embedding, decoder = graphs["embedding"], graphs["model"]
    encoder = graphs["vision_encoder"]
    encoded = [encoder.run(call) for call in calls_of(picture, encoder)] if picture else []
    features = {name: np.concatenate([each[name] for each in encoded]) for name in (encoded[0] if encoded else ())}
    ids = [*[IMAGE] * len(features.get("image_features", ())), *prompt] if IMAGE not in prompt else prompt
    new, ends = list(ids), end_tokens()
    generated: list[int] = []
    types = (np.array([ids]) == IMAGE).astype(np.int64)
    positions = positions_of(ids, picture, thrice=len(decoder.inputs["position_ids"].shape) == 3)
    nothing = {**embedding.zeros("image_features", free=0), **embedding.zeros("deepstack_features", free=0)}
    given = {**nothing, **features}
    cache = decoder.zeros("past_key_values.", free=0)
    while len(generated) < max_new_tokens:
        made = embedding.run({"input_ids": np.array([new]), **given})
        text = {"attention_mask": np.ones_like(types), "position_ids": positions, **dict.fromkeys(TYPES, types)}
        results = decoder.run({**made, **text, **cache})
        token = int(results["logits"][0, -1].argmax())
        if token in ends:
            break
        generated.append(token)
        new, given = [token], nothing
        positions = np.full_like(positions[..., -1:], positions.max() + 1)
        types = np.pad(types, ((0, 0), (0, 1)))
        cache = {
            name.replace("present.", "past_key_values."): value
            for name, value in results.items()
            if name.startswith("present.")
        }
    return generated


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
    parser = argparse.ArgumentParser(description="Generate text with the ONNX models beside this file.")
    parser.add_argument("prompt", nargs="?", default="The")
    parser.add_argument("--picture", type=Path, help="file of numpy.savez with the inputs of vision_encoder.onnx")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--provider", choices=("auto", "cuda", "cpu"), default="auto")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    chosen = providers(args.provider)
    graphs = {name: Graph(f"{name}.onnx", chosen) for name in ("vision_encoder", "embedding", "model")}
    picture = dict(np.load(args.picture)) if args.picture else {}
    ids = picture.pop("input_ids")[0].tolist() if "input_ids" in picture else tokenizer.encode(args.prompt).ids
    if not ids:
        parser.error("the prompt has no tokens")
    made = generate(ids, picture, graphs=graphs, max_new_tokens=args.max_new_tokens)
    print((args.prompt if IMAGE not in ids else "") + tokenizer.decode(made))


if __name__ == "__main__":
    main()
