"""Data-free int4 against its peers: ratios of wall time, of peak anonymous memory, and of size.

Usage: ``python tests/benchmarks/bench_quantize.py [--runs 3] [--shape 0.6b] [--folder DIR] [--peer-python PYTHON]``. The model has the
shape of Qwen3 0.6B (or 4B) with random bfloat16 weights, the adapter rank 16 on every linear layer. All are whole commands with
their imports, without Slipway's check of its result, which no peer makes. Compared are

- from a float32 graph: ``slipway stage quantize`` with ONNX Runtime's ``MatMulNBitsQuantizer`` (int4) and ``quantize_dynamic`` (int8);
- from a merged model: ``slipway stage onnx_export`` and ``quantize`` with onnxruntime-genai's builder (``-p int4``);
- from a base model and a LoRA: the same after ``slipway stage merge``, with the builder after peft.

Slipway leaves the weights of what nobody asked for out (``weights=deferred``); ``stored`` are the same commands with every copy written.

Peers run alternately, in one run. Beside wall time stands the time that cores worked, which other processes change less.
``--peer-python`` is the interpreter of an environment with onnxruntime-genai, torch, transformers and peft; without it, the builder
is left out. Ratios are Slipway's figure by a peer's; they are printed and written to ``results/quantize.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench_merge import MAKE, PEFT, SHAPES
from measure import measure

RESULTS = Path(__file__).parent / "results"

NBITS = """
import sys
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
made = MatMulNBitsQuantizer(sys.argv[1] + "/model.onnx", block_size=32, is_symmetric=True, accuracy_level=4,
                            op_types_to_quantize=("MatMul", "Gather"))
made.process()
made.model.save_model_to_file(sys.argv[2] + "/model.onnx", True)
"""

DYNAMIC = """
import sys
from onnxruntime.quantization import quantize_dynamic
quantize_dynamic(sys.argv[1] + "/model.onnx", sys.argv[2] + "/model.onnx", use_external_data_format=True)
"""

Words = list[str | Path]
Command = Callable[[Path, Path], list[Words]]


@dataclass(frozen=True)
class Run:
    """One run of a command, or of several one after another."""

    seconds: float
    core_seconds: float
    peak_mb: float
    mb: float


Inputs = dict[str, Path]
SLIPWAY = Path(sys.executable).with_name("slipway")


def stage(name: str, inputs: Inputs, out: Path, *params: str) -> Words:
    """A stage by itself."""
    words: Words = [SLIPWAY, "stage", name]
    for each, folder in inputs.items():
        words += ["--input", f"{each}={folder}"]
    for param in params:
        words += ["--param", param]
    return [*words, "--out", out]


def lora(root: Path) -> Inputs:
    """The base model and the adapter."""
    return {"base": root / "base", "adapter": root / "adapter"}


def export(inputs: Inputs, out: Path, *params: str) -> Words:
    """The stage that exports."""
    return stage("onnx_export", inputs, out, "parity=never", *params)


def quantize(inputs: Inputs, out: Path, *, form: str = "onnx") -> Words:
    """The stage that quantizes."""
    return stage("quantize", inputs, out, f"format={form}", "level=int4", "check=false")


def slipway_graph(root: Path, out: Path) -> list[Words]:
    """From a float32 graph."""
    return [quantize({"model": root / "onnx" / "onnx"}, out / "result")]


def stored_model(root: Path, out: Path) -> list[Words]:
    """From a merged model, with the float32 graph on disk."""
    return [
        export({"pytorch": root / "base"}, out / "onnx"),
        quantize({"model": out / "onnx" / "onnx"}, out / "result"),
    ]


def slipway_model(root: Path, out: Path) -> list[Words]:
    """From a merged model."""
    given = {"pytorch": root / "base"}
    return [
        export(given, out / "onnx", "weights=deferred"),
        quantize({"model": out / "onnx" / "onnx", **given}, out / "result"),
    ]


def stored_lora(root: Path, out: Path) -> list[Words]:
    """From a base model and a LoRA, with the merged model and the float32 graph on disk."""
    return [
        stage("merge", lora(root), out / "merged"),
        export({"pytorch": out / "merged" / "pytorch"}, out / "onnx"),
        quantize({"model": out / "onnx" / "onnx"}, out / "result"),
    ]


def slipway_lora(root: Path, out: Path) -> list[Words]:
    """From a base model and a LoRA."""
    given = {"pytorch": out / "merged" / "pytorch", **lora(root)}
    return [
        stage("merge", lora(root), out / "merged", "weights=deferred"),
        export(given, out / "onnx", "weights=deferred"),
        quantize({"model": out / "onnx" / "onnx", **given}, out / "result"),
    ]


def slipway_pytorch(root: Path, out: Path) -> list[Words]:
    """A merged model to compressed-tensors, which has no peer here."""
    return [quantize({"model": root / "base"}, out / "result", form="pytorch")]


def slipway_lorapytorch(root: Path, out: Path) -> list[Words]:
    """The same from a base model and a LoRA."""
    given = {"model": out / "merged" / "pytorch", **lora(root)}
    return [
        stage("merge", lora(root), out / "merged", "weights=deferred"),
        quantize(given, out / "result", form="pytorch"),
    ]


def nbits(root: Path, out: Path) -> list[Words]:
    """ONNX Runtime's quantizer to int4, from a float32 graph."""
    (out / "result").mkdir()
    return [[sys.executable, "-c", NBITS, root / "onnx" / "onnx", out / "result"]]


def dynamic(root: Path, out: Path) -> list[Words]:
    """ONNX Runtime's quantizer to int8, from a float32 graph."""
    (out / "result").mkdir()
    return [[sys.executable, "-c", DYNAMIC, root / "onnx" / "onnx", out / "result"]]


def builder(python: Path, source: Path, out: Path) -> Words:
    """The builder of onnxruntime-genai, from a merged model."""
    words: Words = [python, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", out / "result", "-e", "cpu"]
    return [*words, "-p", "int4", "-c", out / "cache"]


def peers(python: Path | None) -> dict[str, Command]:
    """Return all commands by name."""
    found: dict[str, Command] = {
        "slipway_graph": slipway_graph,
        "nbits_graph": nbits,
        "dynamic_graph": dynamic,
        "slipway_model": slipway_model,
        "stored_model": stored_model,
        "slipway_pytorch": slipway_pytorch,
        "slipway_lora": slipway_lora,
        "stored_lora": stored_lora,
        "slipway_lorapytorch": slipway_lorapytorch,
    }
    if python:

        def genai_model(root: Path, out: Path) -> list[Words]:
            return [builder(python, root / "base", out)]

        def genai_lora(root: Path, out: Path) -> list[Words]:
            merged = out / "merged"
            return [
                [python, "-c", PEFT, root / "base", root / "adapter", merged],
                builder(python, merged, out),
            ]

        found |= {"genai_model": genai_model, "genai_lora": genai_lora}
    return found


def run(commands: list[Words], out: Path) -> Run:
    """Run commands one after another: their time together, the peak of the largest, the size of the result."""
    found = [measure(command) for command in commands]
    size = sum(path.stat().st_size for path in (out / "result").rglob("*") if path.is_file())
    peak = max(one.peak_anonymous_bytes for one in found)
    return Run(sum(one.seconds for one in found), sum(one.core_seconds for one in found), peak / 1e6, size / 1e6)


def rounds(root: Path, commands: dict[str, Command], runs: int) -> dict[str, list[Run]]:
    """Alternate all, so that a drift of the machine meets all; the first round warms the page cache and does not count."""
    found: dict[str, list[Run]] = {name: [] for name in commands}
    for number in range(runs + 1):
        for name, command in commands.items():
            out = root / "out"
            out.mkdir()
            measured = run(command(root, out), out)
            shutil.rmtree(out)
            if number:
                found[name].append(measured)
    return found


def figures(found: dict[str, list[Run]]) -> dict[str, float]:
    """Medians of all, and the medians of the ratios of each round to each peer that starts from the same."""
    made = {}
    for name, each in found.items():
        made[f"{name}_seconds"] = statistics.median(one.seconds for one in each)
        made[f"{name}_core_seconds"] = statistics.median(one.core_seconds for one in each)
        made[f"{name}_peak_anonymous_mb"] = max(one.peak_mb for one in each)
        made[f"{name}_mb"] = each[-1].mb
    for name, each in found.items():
        peer, _, start = name.partition("_")
        if peer == "slipway" or f"slipway_{start}" not in found:
            continue
        pairs = list(zip(found[f"slipway_{start}"], each, strict=True))
        made[f"{start}_time_ratio_to_{peer}"] = statistics.median(a.seconds / b.seconds for a, b in pairs)
        made[f"{start}_core_ratio_to_{peer}"] = statistics.median(a.core_seconds / b.core_seconds for a, b in pairs)
        made[f"{start}_memory_ratio_to_{peer}"] = statistics.median(a.peak_mb / b.peak_mb for a, b in pairs)
        made[f"{start}_size_ratio_to_{peer}"] = pairs[-1][0].mb / pairs[-1][1].mb
    return made


def main() -> None:
    """Make the model, measure, print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="counted rounds")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--only", nargs="*", help="commands to run; all if not given")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the model and outputs go; about 9 GB, of the 4B shape 45 GB, or 12 GB with --only slipway_lora",
    )
    parser.add_argument("--peer-python", type=Path, help="interpreter of an environment with onnxruntime-genai")
    arguments = parser.parse_args()
    commands = peers(arguments.peer_python and arguments.peer_python.absolute())
    commands = {name: command for name, command in commands.items() if name in (arguments.only or commands)}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        root = Path(made)
        measure([sys.executable, "-c", MAKE, root, json.dumps(SHAPES[arguments.shape])])
        if any(name.endswith("_graph") for name in commands):
            measure(export({"pytorch": root / "base"}, root / "onnx"))
        found = figures(rounds(root, commands, arguments.runs))
    for name, value in found.items():
        print(f"{name:36} {value:10.3f}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quantize.json").write_text(json.dumps({"shape": arguments.shape, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
