"""The merge stage against peft's load, merge and save: ratios of wall time and of peak anonymous memory, in one run.

Usage: ``python tests/benchmarks/bench_merge.py [--runs 3] [--folder DIR]``. The model has Qwen3-0.6B's shape with random bfloat16
weights, the adapter has rank 16 on every linear layer. Prints the ratios and writes them to ``results/merge.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from measure import Measured, measure

RESULTS = Path(__file__).parent / "results"
SLIPWAY = Path(sys.executable).with_name("slipway")

MAKE = """
import sys, torch, transformers
from pathlib import Path
from peft import LoraConfig, get_peft_model
root = Path(sys.argv[1])
config = transformers.Qwen3Config(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True, dtype="bfloat16")
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(root / "base")
lora = LoraConfig(r=16, lora_alpha=24, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
get_peft_model(model, lora).save_pretrained(root / "adapter")
"""

PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
PeftModel.from_pretrained(base, sys.argv[2]).merge_and_unload().save_pretrained(sys.argv[3])
"""


def ours(root: Path, out: Path) -> list[str | Path]:
    """The command of the merge stage alone."""
    inputs = ["--input", f"base={root / 'base'}", "--input", f"adapter={root / 'adapter'}"]
    return [SLIPWAY, "stage", "merge", *inputs, "--out", out]


def theirs(root: Path, out: Path) -> list[str | Path]:
    """A process that does the same with peft."""
    return [sys.executable, "-c", PEFT, root / "base", root / "adapter", out]


def run(root: Path, runs: int) -> dict[str, float]:
    """Alternate both, so that a drift of the machine meets both; medians of the pairs' ratios."""
    pairs: list[tuple[Measured, Measured]] = []
    for number in range(runs + 1):
        pair = []
        for command in (ours, theirs):
            out = root / "out"
            pair.append(measure(command(root, out)))
            shutil.rmtree(out)
        if number:  # the first pair warms the page cache
            pairs.append((pair[0], pair[1]))
    return {
        "slipway_seconds": statistics.median(a.seconds for a, _ in pairs),
        "peft_seconds": statistics.median(b.seconds for _, b in pairs),
        "time_ratio": statistics.median(a.seconds / b.seconds for a, b in pairs),
        "slipway_peak_anonymous_mb": max(a.peak_anonymous_bytes for a, _ in pairs) / 1e6,
        "peft_peak_anonymous_mb": max(b.peak_anonymous_bytes for _, b in pairs) / 1e6,
        "memory_ratio": statistics.median(a.peak_anonymous_bytes / b.peak_anonymous_bytes for a, b in pairs),
    }


def main() -> None:
    """Make the models, measure, print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="counted pairs of runs")
    parser.add_argument("--folder", type=Path, help="where the models and outputs go; about 4 GB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder)
        measure([sys.executable, "-c", MAKE, root])
        figures = run(root, arguments.runs)
    for name, value in figures.items():
        print(f"{name:28} {value:10.3f}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "merge.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
