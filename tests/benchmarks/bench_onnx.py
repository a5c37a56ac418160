"""The ONNX export against onnxruntime-genai's builder and mobius's own command: wall time, peak memory, and speed of the result.

Usage: ``python tests/benchmarks/bench_onnx.py [--part export|speed] [--runs 3] [--folder DIR] [--peer-python PYTHON]``. The model has the shape of Qwen3
0.6B with random bfloat16 weights. Exported are float32, and int4 (``slipway stage onnx_export``, then ``quantize``; genai's builder
with ``-p int4``), as commands with their imports, without a comparison with PyTorch, which no peer makes. Peers run alternately, in
one run. ``--peer-python`` is the interpreter of an environment with onnxruntime-genai, torch and transformers; without it, genai is
left out. Ratios are Slipway's figure by a peer's; they are printed and written to ``results/onnx.json``.

The speed of the result is that of the form for serving (``past_present_share_buffer``, ``logits_to_keep: 1``) against what genai's
builder writes, both in ONNX Runtime with shared buffers: a prompt, then a token at a time (:mod:`decode_speed`). ``limit_ratio`` says how
much faster than genai's the decoding of fp32 can be at most: every weight is read once for each token, and memory is not read faster.
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
from decode_speed import alternate, ratios, read_bandwidth
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
    return [*slipway_fp32(base, out), quantizing(out / "onnx" / "onnx", out / "int4")]


def quantizing(graph: Path, out: Path, *, group_size: int = 32) -> list[str | Path]:
    """Return the command of the stage that quantizes."""
    params = ["format=onnx", "level=int4", "check=false", f"group_size={group_size}"]
    words = ["stage", "quantize", "--input", f"model={graph}", *(word for one in params for word in ("--param", one))]
    return [BIN / "slipway", *words, "--out", out]


def mobius_fp32(base: Path, out: Path) -> list[list[str | Path]]:
    """mobius's command, with weights."""
    return [[BIN / "mobius", "build", "--config", base, "--ep", "cpu", out / "onnx"]]


def genai(python: Path, precision: str, *options: str) -> Command:
    """Return the command of onnxruntime-genai's builder."""

    def command(base: Path, out: Path) -> list[list[str | Path]]:
        words = ["-m", "onnxruntime_genai.models.builder", "-i", base, "-o", out / "onnx", "-e", "cpu"]
        further = ["--extra_options", *options] if options else []
        return [[python, *words, "-p", precision, "-c", out / "cache", *further]]

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


def speeds(base: Path, root: Path, peer_python: Path | None, *, threads: int, runs: int) -> dict[str, float]:
    """Make what is served, run it in turn, and return ratios to genai's; only the own figures without its builder."""
    own = root / "served"
    (command,) = slipway_fp32(base, own)
    measure([*command[:-2], "--param", "past_present_share_buffer=true", "--param", "logits_to_keep=1", *command[-2:]])
    graph = own / "onnx" / "onnx"
    int4 = {"slipway_int4": 32, "slipway_int4_group_128": 128}
    for name, size in int4.items():
        measure(quantizing(graph, root / name, group_size=size))
    folders = {"fp32": {"slipway_fp32": graph}, "int4": {name: root / name / "model" for name in int4}}
    if peer_python is not None:
        for name, precision, *options in (
            ("genai_fp32", "fp32"),
            ("genai_int4", "int4"),
            ("genai_int4_pruned", "int4", "prune_lm_head=true"),
        ):
            run(genai(peer_python, precision, *options)(base, root / name))
            folders[precision][name] = root / name / "onnx"
    made: dict[str, float] = {}
    for some in folders.values():
        found = alternate(some, threads=threads, prompt=128, steps=64, rounds=runs)
        for name, rounds in found.items():
            made[f"{name}_decode_tokens_per_second"] = statistics.median(one.decode_tokens_per_second for one in rounds)
            made[f"{name}_prefill_seconds"] = statistics.median(one.prefill_seconds for one in rounds)
            for peer in found if name.startswith("slipway") else ():
                if peer.startswith("genai"):
                    made |= {f"{name}_{kind}_to_{peer}": value for kind, value in ratios(rounds, found[peer]).items()}
    if peer_python is not None:
        limit = read_bandwidth(threads=threads) / (root / "served" / "onnx" / "onnx" / "model.onnx.data").stat().st_size
        made["fp32_decode_limit_tokens_per_second"] = limit
        made["fp32_decode_limit_ratio"] = limit / made["genai_fp32_decode_tokens_per_second"]
    return made


def main() -> None:
    """Make the model, measure, print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="counted rounds")
    parser.add_argument("--part", choices=("export", "speed"), help="measure only this")
    parser.add_argument("--threads", type=int, default=2, help="threads that run the result; 1 on a busy machine")
    parser.add_argument("--folder", type=Path, help="where the model and outputs go; about 12 GB")
    parser.add_argument("--peer-python", type=Path, help="interpreter of an environment with onnxruntime-genai")
    arguments = parser.parse_args()
    builder = (
        {} if arguments.peer_python is None else {name: genai(arguments.peer_python, name) for name in ("fp32", "int4")}
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        root = Path(made)
        measure([sys.executable, "-c", MAKE, root, json.dumps(SHAPES["0.6b"])])
        found: dict[str, float] = {}
        if arguments.part != "speed":
            fp32 = {"slipway_fp32": slipway_fp32, "mobius_fp32": mobius_fp32}
            fp32 |= {"genai_fp32": builder["fp32"]} if builder else {}
            found |= figures(rounds(root / "base", root, fp32, arguments.runs), own="slipway_fp32")
            int4 = {"slipway_int4": slipway_int4} | ({"genai_int4": builder["int4"]} if builder else {})
            found |= figures(rounds(root / "base", root, int4, arguments.runs), own="slipway_int4")
        if arguments.part != "export":
            found |= speeds(
                root / "base", root, arguments.peer_python, threads=arguments.threads, runs=3 * arguments.runs
            )
    for name, value in found.items():
        print(f"{name:44} {value:10.3f}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"onnx{'_' + arguments.part if arguments.part else ''}.json").write_text(
        json.dumps(found, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
