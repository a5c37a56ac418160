"""The merge stage against peft's load, merge and save, and against ``cp``: ratios of wall time and of peak anonymous memory.

Usage: ``python tests/benchmarks/bench_merge.py [--runs 3] [--folder DIR] [--small]``. The models have the shapes of Qwen3 0.6B and
4B with random bfloat16 weights, the adapters rank 16 on every linear layer. Peers run alternately, in one run. Measured are the
stage in a process of its own, as the peers are, and ``slipway stage merge`` with its command line and child process around it;
ratios are the stage's. They are printed and written to ``results/merge.json``; digests are computed in all of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from measure import Measured, measure

RESULTS = Path(__file__).parent / "results"
SLIPWAY = Path(sys.executable).with_name("slipway")
SHAPES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}

MAKE = """
import json, sys, torch, transformers
from pathlib import Path
from peft import LoraConfig, get_peft_model
root = Path(sys.argv[1])
config = transformers.Qwen3Config(
    vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
    dtype="bfloat16", **json.loads(sys.argv[2]))
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(root / "base", max_shard_size="5GB")
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

STAGE = """
import sys
from pathlib import Path
from slipway.machine.cgroup import usable_cores
from slipway.stage import Context
from slipway_merge.stage import STAGE, MergeParams
out = Path(sys.argv[3])
out.mkdir()
inputs = {"base": Path(sys.argv[1]), "adapter": Path(sys.argv[2])}
STAGE.run(inputs, MergeParams(), Context(workdir=out, threads=usable_cores()))
"""

Command = Callable[[Path, Path], list[str | Path]]


def stage(root: Path, out: Path) -> list[str | Path]:
    """A process that runs the merge stage."""
    return [sys.executable, "-c", STAGE, root / "base", root / "adapter", out]


def command(root: Path, out: Path) -> list[str | Path]:
    """The command of the merge stage alone."""
    inputs = ["--input", f"base={root / 'base'}", "--input", f"adapter={root / 'adapter'}"]
    return [SLIPWAY, "stage", "merge", *inputs, "--out", out]


def peft(root: Path, out: Path) -> list[str | Path]:
    """A process that does the same with peft."""
    return [sys.executable, "-c", PEFT, root / "base", root / "adapter", out]


def cp(root: Path, out: Path) -> list[str | Path]:
    """The base, copied."""
    return ["cp", "-r", root / "base", out]


def rounds(root: Path, commands: dict[str, Command], runs: int) -> list[dict[str, Measured]]:
    """Alternate all, so that a drift of the machine meets all; the first round warms the page cache and does not count."""
    measured = []
    for _ in range(runs + 1):
        found = {}
        for name, made in commands.items():
            out = root / "out"
            found[name] = measure(made(root, out))
            shutil.rmtree(out)
        measured.append(found)
    return measured[1:]


def figures(measured: list[dict[str, Measured]], *, shape: str, peer: str) -> dict[str, float]:
    """Medians of all, and of the rounds' ratios."""
    found = {}
    for name in measured[0]:
        found[f"{shape}_{name}_seconds"] = statistics.median(one[name].seconds for one in measured)
        found[f"{shape}_{name}_peak_anonymous_mb"] = max(one[name].peak_anonymous_bytes for one in measured) / 1e6
    ratios = [one["stage"].seconds / one[peer].seconds for one in measured]
    found[f"{shape}_time_ratio_to_{peer}"] = statistics.median(ratios)
    memory = [one["stage"].peak_anonymous_bytes / max(one[peer].peak_anonymous_bytes, 1) for one in measured]
    found[f"{shape}_memory_ratio_to_{peer}"] = statistics.median(memory)
    return found


def bench(shape: str, folder: Path | None, peer: Command, runs: int) -> dict[str, float]:
    """Make one model and measure it against a peer."""
    name = peer.__name__
    with tempfile.TemporaryDirectory(dir=folder) as made:
        root = Path(made)
        measure([sys.executable, "-c", MAKE, root, json.dumps(SHAPES[shape])])
        return figures(rounds(root, {"stage": stage, "command": command, name: peer}, runs), shape=shape, peer=name)


def main() -> None:
    """Make the models, measure, print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="counted pairs of runs")
    parser.add_argument("--folder", type=Path, help="where the models and outputs go; about 17 GB, with --small 4 GB")
    parser.add_argument("--small", action="store_true", help="leave out the 4B shape")
    arguments = parser.parse_args()
    found = bench("0.6b", arguments.folder, peft, arguments.runs)
    if not arguments.small:
        found |= bench("4b", arguments.folder, cp, arguments.runs)
        found["memory_ratio_of_4b_to_0.6b"] = (
            found["4b_stage_peak_anonymous_mb"] / found["0.6b_stage_peak_anonymous_mb"]
        )
        found.pop("4b_memory_ratio_to_cp")
    for name, value in found.items():
        print(f"{name:36} {value:10.3f}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "merge.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
