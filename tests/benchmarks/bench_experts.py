"""A LoRA on Qwen3-30B-A3B to int4 in one command, from files that have no blocks on the disk: time and memory beside reading and writing as many bytes.

Usage: ``python tests/benchmarks/bench_experts.py [--layers 48] [--folder DIR]``. The base has the shape of Qwen3-30B-A3B (48 layers, 128 experts, 61 GB in
bfloat16), expert by expert as its publisher stores it; its files are holes, which read as zeros. The adapter has rank 8 on attention and on every expert, with
factors drawn at random, so that every merged weight is another. ``slipway export`` makes int4 alone: merged weights are made where they are read, and only the
integers are written, 17 GB. Beside it, ``cat`` reads the base and ``cp`` copies what was written. Ratios are printed and written to ``results/experts.json``.
``--layers`` takes fewer for a first look.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from measure import measure
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.models.tiny_models import save_tokenizer

RESULTS = Path(__file__).parent / "results" / "experts.json"
SLIPWAY = Path(sys.executable).with_name("slipway")
HIDDEN, INNER, EXPERTS, HEADS, KV_HEADS, WIDTH, VOCABULARY = 2048, 768, 128, 32, 4, 128, 151_936
RANK = 8
MEMORY = 4_000_000_000  # too little to load the result of even a few layers, which no stage then does
_SHARD_LAYERS = 4


def matrices(layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the linear layers of a layer with their shapes, (out, in)."""
    attention = {"q": (HEADS * WIDTH, HIDDEN), "k": (KV_HEADS * WIDTH, HIDDEN), "v": (KV_HEADS * WIDTH, HIDDEN)}
    for name, shape in {**attention, "o": (HIDDEN, HEADS * WIDTH)}.items():
        yield f"model.layers.{layer}.self_attn.{name}_proj", shape
    for expert in range(EXPERTS):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        yield f"{prefix}.gate_proj", (INNER, HIDDEN)
        yield f"{prefix}.up_proj", (INNER, HIDDEN)
        yield f"{prefix}.down_proj", (HIDDEN, INNER)


def make_base(folder: Path, layers: int) -> int:
    """Write a base whose tensors are holes; return its bytes."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "num_experts": EXPERTS,
        "num_experts_per_tok": 8, "moe_intermediate_size": INNER, "intermediate_size": 6144, "norm_topk_prob": True,
        "vocab_size": VOCABULARY, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "dtype": "bfloat16",
        "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)
    ends = [("model.embed_tokens.weight", (VOCABULARY, HIDDEN)), ("lm_head.weight", (VOCABULARY, HIDDEN))]
    groups = [[*ends, ("model.norm.weight", (HIDDEN,))]]
    for first in range(0, layers, _SHARD_LAYERS):
        group = []
        for layer in range(first, min(layers, first + _SHARD_LAYERS)):
            group += [(f"{name}.weight", shape) for name, shape in matrices(layer)]
            prefix = f"model.layers.{layer}"
            group += [(f"{prefix}.self_attn.{name}_norm.weight", (WIDTH,)) for name in "qk"]
            group += [(f"{prefix}.{name}_layernorm.weight", (HIDDEN,)) for name in ("input", "post_attention")]
            group.append((f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)))
        groups.append(group)
    places, total = {}, 0
    for number, group in enumerate(groups):
        name = f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        total += _write_holes(folder / name, group)
        places |= {tensor: name for tensor, _ in group}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write_holes(path: Path, tensors: list[tuple[str, tuple[int, ...]]]) -> int:
    header, offset = {}, 0
    for name, shape in tensors:
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return offset


def make_adapter(folder: Path, layers: int, *, experts: bool = True) -> None:
    """Write factors of rank 8 for every linear layer, or for attention alone, drawn at random."""
    folder.mkdir()
    draw, tensors = np.random.default_rng(0), {}
    for layer in range(layers):
        for name, (rows, columns) in matrices(layer):
            if not experts and ".experts." in name:
                continue
            for which, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                values = draw.standard_normal(shape, dtype=np.float32) * 0.02
                tensors[f"base_model.model.{name}.lora_{which}.weight"] = values.astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", *(["gate_proj", "up_proj", "down_proj"] if experts else [])]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 12, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))


def main() -> None:
    """Make the files, measure, print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--folder", type=Path, help="where the files go; 40 GB for 48 layers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        root = Path(made)
        base_bytes = make_base(root / "base", arguments.layers)
        make_adapter(root / "adapter", arguments.layers)
        words = [
            SLIPWAY,
            "export",
            root / "adapter",
            "--base-model",
            root / "base",
            "-f",
            "pytorch:int4",
            "--out",
            root / "out",
        ]
        words += [
            "--set",
            "validation.enabled=false",
            "--set",
            f"resources.max_memory_bytes={MEMORY}",
            "--progress",
            "none",
        ]
        ours = measure(words, environment={"SLIPWAY_HOME": str(root / "home")})
        [output] = (root / "out").glob("*/pytorch-int4")
        written = sum(path.stat().st_size for path in output.iterdir() if path.is_file())
        shutil.rmtree(root / "home")
        shards = sorted((root / "base").glob("*.safetensors"))
        read = measure(["sh", "-c", 'cat "$@" > /dev/null', "sh", *shards])
        copied = measure(["cp", "-r", output, root / "copy"])
    found = {
        "layers": arguments.layers,
        "base_gb": base_bytes / 1e9,
        "written_gb": written / 1e9,
        "seconds": ours.seconds,
        "core_seconds": ours.core_seconds,
        "peak_anonymous_mb": ours.peak_anonymous_bytes / 1e6,
        "read_seconds": read.seconds,
        "copy_seconds": copied.seconds,
        "time_ratio_to_read_and_copy": ours.seconds / (read.seconds + copied.seconds),
    }
    for name, value in found.items():
        print(f"{name:30} {value:10.2f}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
