"""Memory and time of a proof layer by layer, by the number of layers of a large model's shape: memory must not grow.

Usage: ``python tests/benchmarks/bench_layers.py [--shape 70b] [--layers 2 4] [--windows 2] [--tokens 32] [--folder DIR]``. The base is made of holes, which read as
zeros: in Llama-3.3-70B's shape (``70b``: 1.7 GB a layer, 4.2 GB of tables in bfloat16; rank 8 on attention and feed-forward), or in that of Qwen3-30B-A3B
(``30b-a3b``: 1.2 GB a layer of 128 experts, 1.2 GB of tables; rank 8 on attention, ``30b-a3b-experts`` on every expert too). A process computes what the stage
``reference`` does: windows with and without the adapter, and the shapes with their caches. Its peak of anonymous memory and its time are printed, and written to
``results/layers-SHAPE.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measure import measure
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import bench_experts
from bench_experts import _write_holes

RESULTS = Path(__file__).parent / "results"
HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, VOCABULARY = 8192, 28672, 64, 8, 128, 128_256
RANK = 8

RUN = """
import json, sys
from pathlib import Path
import numpy as np
from slipway.proof.runtime import Samples
from slipway_validate.cases import find_family, shape_cases
from slipway_validate.protocol.messages import RunSpec, Spec
from slipway_validate.reference.running import RUNTIME
from slipway_validate.runner.main import execute
root, windows, tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
Samples(np.random.default_rng(0).integers(10, 1000, (windows, tokens))).write(root / "samples")
(root / "run").mkdir()
cases = shape_cases(find_family("decoder"), windows, tokens)
spec = RunSpec(runtime=RUNTIME, model=root / "base", adapter=root / "adapter", samples=root / "samples", cases=cases, by_layers=True)
result, _ = execute(Spec(run=spec), root / "run")
assert result.status == "done", result.message
"""


def matrices(layer: int) -> dict[str, tuple[int, int]]:
    """Return the linear layers of a layer with their shapes, (out, in)."""
    prefix, width = f"model.layers.{layer}", KV_HEADS * WIDTH
    return {
        f"{prefix}.self_attn.q_proj": (HEADS * WIDTH, HIDDEN),
        f"{prefix}.self_attn.k_proj": (width, HIDDEN),
        f"{prefix}.self_attn.v_proj": (width, HIDDEN),
        f"{prefix}.self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
        f"{prefix}.mlp.gate_proj": (INNER, HIDDEN),
        f"{prefix}.mlp.up_proj": (INNER, HIDDEN),
        f"{prefix}.mlp.down_proj": (HIDDEN, INNER),
    }


def make_base(folder: Path, layers: int) -> int:
    """Write a base whose tensors are holes; return its bytes."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH,
        "vocab_size": VOCABULARY, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
        "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (VOCABULARY, HIDDEN)),
        ("lm_head.weight", (VOCABULARY, HIDDEN)),
        ("model.norm.weight", (HIDDEN,)),
    ]
    for layer in range(layers):
        tensors += [(f"{name}.weight", shape) for name, shape in matrices(layer).items()]
        names = ("input_layernorm", "post_attention_layernorm")
        tensors += [(f"model.layers.{layer}.{name}.weight", (HIDDEN,)) for name in names]
    return _write_holes(folder / "model.safetensors", tensors)


def make_adapter(folder: Path, layers: int) -> None:
    """Write factors of rank 8 for every linear layer."""
    folder.mkdir()
    tensors = {}
    for layer in range(layers):
        for name, (rows, columns) in matrices(layer).items():
            for which, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                tensors[f"base_model.model.{name}.lora_{which}.weight"] = np.full(shape, 0.01, np.float32)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name in matrices(0)})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))


SHAPES: dict[str, tuple[Callable[[Path, int], int], Callable[[Path, int], None]]] = {
    "70b": (make_base, make_adapter),
    "30b-a3b": (
        bench_experts.make_base,
        lambda folder, layers: bench_experts.make_adapter(folder, layers, experts=False),
    ),
    "30b-a3b-experts": (bench_experts.make_base, bench_experts.make_adapter),
}
"""What makes the base and the adapter."""


def main() -> None:
    """Measure each depth; print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="70b")
    parser.add_argument("--layers", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="where the files go; their holes take no blocks")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
            root = Path(made)
            base, adapter = SHAPES[arguments.shape]
            size = base(root / "base", layers)
            adapter(root / "adapter", layers)
            used = measure([sys.executable, "-c", RUN, root, str(arguments.windows), str(arguments.tokens)])
        found[str(layers)] = {
            "base_gb": size / 1e9,
            "peak_gb": used.peak_anonymous_bytes / 1e9,
            "core_seconds": used.core_seconds,
            "seconds": used.seconds,
        }
        print(
            f"{layers} layers, {size / 1e9:.1f} GB: {used.peak_anonymous_bytes / 1e9:.2f} GB of anonymous memory",
            flush=True,
        )
        print(f"  {used.core_seconds:.0f} core seconds, {used.seconds:.0f} s", flush=True)
    RESULTS.mkdir(exist_ok=True)
    shape = {"windows": arguments.windows, "tokens": arguments.tokens, "by_layers": found}
    (RESULTS / f"layers-{arguments.shape}.json").write_text(json.dumps(shape, indent=2) + "\n")


if __name__ == "__main__":
    main()
