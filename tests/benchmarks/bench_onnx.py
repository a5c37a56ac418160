"""The ONNX export against onnxruntime-genai's builder and mobius's own command: ratios of wall time and of peak anonymous memory.

Usage: ``python tests/benchmarks/bench_onnx.py [--runs 3] [--folder DIR] [--peer-python PYTHON]``. The model has the shape of Qwen3
0.6B with random bfloat16 weights. Exported are float32, and int4 (``slipway stage onnx_export``, then ``quantize``; genai's builder
with ``-p int4``), as commands with their imports, without a comparison with PyTorch, which no peer makes. Peers run alternately, in
one run. ``--peer-python`` is the interpreter of an environment with onnxruntime-genai, torch and transformers; without it, genai is
left out. Ratios are Slipway's figure by a peer's; they are printed and written to ``results/onnx.json``.
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

from bench_merge import MAKE, SHAPES
from measure import Measured, measure

RESULTS = Path(__file__).parent / "results"
BIN = Path(sys.executable).parent
Command = Callable[[Path, Path], list[list[str | Path]]]


def slipway_fp32(base: Path, out: Path) -> list[list[str | Path]]:
    """The stage that exports, alone."""
    words = ["stage", "onnx_export", "--input", f"pytorch={base}", "--param", "parity=never", "--out", out / "onnx"]
    return [[BIN / "slipway", *words]]


def slipway_int4(base: Path, out: Path) -> list[list[str | Path]]:
    """The same, and the stage that quantizes its graph."""
    words = [
        "stage",
        "quantize",
        "--input",
        f"model={out / 'onnx' / 'onnx'}",
        "--param",
        "format=onnx",
        "--param",
        "level=int4",
    ]
    return [*slipway_fp32(base, out), [BIN / "slipway", *words, "--param", "check=false", "--out", out / "int4"]]


def mobius_fp32(base: Path, out: Path) -> list[list[str | Path]]:
    """mobius's command, with weights."""
    return [[BIN / "mobius", "build", "--config", base, "--ep", "cpu", out / "onnx"]]


def genai(python: Path, precision: str) -> Command:
    """Return the command of onnxruntime-genai's builder."""

    def command(base: Path, out: Path) -> list[list[str | Path]]:
        words = ["-m", "onnxruntime_genai.models.builder", "-i", base, "-o", out / "onnx", "-e", "cpu"]
        return [[python, *words, "-p", precision, "-c", out / "cache"]]

    return command


def run(commands: list[list[str | Path]]) -> Measured:
    """Run commands one after another: their time together, and the peak of the largest."""
    found = [measure(command) for command in commands]
    return Measured(sum(one.seconds for one in found), max(one.peak_anonymous_bytes for one in found))


def rounds(base: Path, folder: Path, peers: dict[str, Command], runs: int) -> dict[str, list[Measured]]:
    """Alternate all, so that a drift of the machine meets all; the first round warms the page cache and does not count."""
    found: dict[str, list[Measured]] = {name: [] for name in peers}
    for number in range(runs + 1):
        for name, command in peers.items():
            out = folder / "out"
            out.mkdir()
            measured = run(command(base, out))
            shutil.rmtree(out)
            if number:
                found[name].append(measured)
    return found


def figures(found: dict[str, list[Measured]], *, own: str) -> dict[str, float]:
    """Medians of all, and the median of the ratios of each round to each peer."""
    made = {}
    for name, runs in found.items():
        made[f"{name}_seconds"] = statistics.median(one.seconds for one in runs)
        made[f"{name}_peak_anonymous_mb"] = max(one.peak_anonymous_bytes for one in runs) / 1e6
    for name in found.keys() - {own}:
        pairs = list(zip(found[own], found[name], strict=True))
        made[f"{own}_time_ratio_to_{name}"] = statistics.median(a.seconds / b.seconds for a, b in pairs)
        made[f"{own}_memory_ratio_to_{name}"] = statistics.median(
            a.peak_anonymous_bytes / b.peak_anonymous_bytes for a, b in pairs
        )
    return made


def main() -> None:
    """Make the model, measure, print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="counted rounds")
    parser.add_argument("--folder", type=Path, help="where the model and outputs go; about 8 GB")
    parser.add_argument("--peer-python", type=Path, help="interpreter of an environment with onnxruntime-genai")
    arguments = parser.parse_args()
    builder = (
        {} if arguments.peer_python is None else {name: genai(arguments.peer_python, name) for name in ("fp32", "int4")}
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        root = Path(made)
        measure([sys.executable, "-c", MAKE, root, json.dumps(SHAPES["0.6b"])])
        fp32 = {"slipway_fp32": slipway_fp32, "mobius_fp32": mobius_fp32}
        fp32 |= {"genai_fp32": builder["fp32"]} if builder else {}
        found = figures(rounds(root / "base", root, fp32, arguments.runs), own="slipway_fp32")
        int4 = {"slipway_int4": slipway_int4} | ({"genai_int4": builder["int4"]} if builder else {})
        found |= figures(rounds(root / "base", root, int4, arguments.runs), own="slipway_int4")
    for name, value in found.items():
        print(f"{name:44} {value:10.3f}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "onnx.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
