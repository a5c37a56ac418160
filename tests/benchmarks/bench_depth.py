"""Memory of what reads text while it quantizes, by the number of layers: it must not grow.

Usage: ``python tests/benchmarks/bench_depth.py [--layers 4 8 28] [--only NAME …] [--windows 256] [--folder DIR]``. The models have the
widths and the vocabulary of Qwen3 0.6B with random bfloat16 weights; 28 layers are its depth. The text is Python's own sources. Measured are

- ``gptq`` and ``auto``: ``slipway stage calibrate``, the whole command; ``auto`` plans for its default budget;
- ``tuned``: the same stage in a process of its own, with few steps of the tuning through the whole model, whose default would take
  half an hour and whose memory does not depend on their number;
- ``int8_static``: ``slipway stage quantize``, from a float32 graph.

Figures are printed and written to ``results/depth.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from bench_merge import MAKE, SHAPES, SLIPWAY
from measure import measure

from slipway.sample.corpus import python_sources
from slipway.sample.models import train_tokenizer

RESULTS = Path(__file__).parent / "results"
STEPS = 3

TUNED = """
import sys
from pathlib import Path
from slipway.stage import Context
from slipway_quantize.calibration import effort
from slipway_quantize.calibration.stage import STAGE, CalibrateParams
effort._LEAST_STEPS = effort.MOST_STEPS = effort.MOST_TIED_STEPS = effort.MOST_STATES_STEPS = int(sys.argv[4])
work = Path(sys.argv[3])
work.mkdir()
inputs = {"model": Path(sys.argv[1]), "data": Path(sys.argv[2])}
STAGE.run(inputs, CalibrateParams(method="autoround", windows=int(sys.argv[5])), Context(workdir=work))
"""

Words = list[str | Path]
WAYS = ("gptq", "auto", "tuned", "int8_static")


def make(root: Path, layers: int) -> Path:
    """Make a model of random weights, and a tokenizer for it."""
    measure([sys.executable, "-c", MAKE, root, json.dumps({**SHAPES["0.6b"], "num_hidden_layers": layers})])
    train_tokenizer(python_sources().training, vocab_size=1024, max_length=40960).save_pretrained(root / "base")
    return root / "base"


def write_text(folder: Path) -> Path:
    """Write the text as ``calibration_data`` does."""
    folder.mkdir()
    lines = (json.dumps({"text": text}) + "\n" for text in python_sources().training)
    (folder / "calibration.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def stage(name: str, inputs: dict[str, Path], out: Path, *params: str) -> Words:
    """The command of a stage."""
    words: Words = [SLIPWAY, "stage", name, "--out", out]
    for each, folder in inputs.items():
        words += ["--input", f"{each}={folder}"]
    for param in params:
        words += ["--param", param]
    return words


def command(way: str, model: Path, text: Path, out: Path, windows: int) -> Words:
    """The command that is measured."""
    if way == "tuned":
        return [sys.executable, "-c", TUNED, model, text, out, str(STEPS), str(windows)]
    if way == "int8_static":
        graph = out.with_name("graph")
        if not graph.exists():
            measure(stage("onnx_export", {"pytorch": model}, graph, "parity=never"))
        inputs = {"model": graph / "onnx", "data": text}
        return stage("quantize", inputs, out, "format=onnx", "level=int8_static", "check=false")
    return stage("calibrate", {"model": model, "data": text}, out, f"method={way}", f"windows={windows}")


def main() -> None:
    """Measure each way with each number of layers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", nargs="*", type=int, default=[4, 8, 28])
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--windows", type=int, default=256, help="most windows of text that calibrate takes")
    parser.add_argument(
        "--folder", type=Path, help="where models and results go; about 30 GB for the tuning of 28 layers"
    )
    arguments = parser.parse_args()
    path = RESULTS / "depth.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    print(f"{'way':12} {'layers':>6} {'GB':>6} {'core s':>7} {'wall s':>7}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        text = write_text(Path(made) / "text")
        for layers in arguments.layers:
            root = Path(made) / str(layers)
            root.mkdir()
            model = make(root, layers)
            for way in arguments.only:
                used = measure(command(way, model, text, root / "out", arguments.windows))
                shutil.rmtree(root / "out")
                gigabytes = used.peak_anonymous_bytes / 1e9
                print(f"{way:12} {layers:6} {gigabytes:6.2f} {used.core_seconds:7.0f} {used.seconds:7.0f}", flush=True)
                key = f"{way}, {layers} layers, {arguments.windows} windows"
                found[key] = {"gb": gigabytes, "core_seconds": used.core_seconds, "seconds": used.seconds}
            shutil.rmtree(root)
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
