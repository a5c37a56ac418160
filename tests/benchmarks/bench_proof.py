"""What the proof of an export costs: the stages ``reference`` and ``validate`` alone, by effort, and the whole export that they end.

Usage: ``python tests/benchmarks/bench_proof.py --sample DIR [--shape 0.6b] [--efforts quick,standard] [--whole] [--folder DIR]``. Outputs are pytorch, pytorch-int4, onnx and
onnx-int4 of a model of this shape with random bfloat16 weights, or of the trained sample. Printed and written to ``results/proof.json`` are, for each effort, wall time, core seconds, which other load
changes less, and the peak of anonymous memory of all processes together. ``validate`` gets the reference that ``reference`` made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from bench_merge import MAKE, SHAPES
from bench_onnx import BIN, quantizing, slipway_fp32
from measure import Measured, measure

from slipway.model.runs.checkpoints import find_checkpoint

RESULTS = Path(__file__).parent / "results"
_NOT_PASSED = 4
"""Exit code where an output failed: int4 of random weights does."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def outputs(base: Path, adapter: Path, root: Path) -> dict[str, Path]:
    """Make the outputs; return their folders by name."""
    merge = ["stage", "merge", "--input", f"base={base}", "--input", f"adapter={adapter}", "--out", root / "merge"]
    measure([BIN / "slipway", *merge])
    merged, graph = root / "merge" / "pytorch", root / "onnx" / "onnx" / "onnx"
    measure(slipway_fp32(merged, root / "onnx")[0])
    measure(quantizing(graph, root / "onnx-int4"))
    words = ["stage", "quantize", "--input", f"model={merged}", "--param", "format=pytorch", "--param", "level=int4"]
    measure([BIN / "slipway", *words, "--param", "check=false", "--out", root / "pytorch-int4"])
    made = {name: root / name / "model" for name in ("pytorch-int4", "onnx-int4")}
    return {"pytorch": merged, "onnx": graph, **made}


def prove(sources: dict[str, Path], made: dict[str, Path], root: Path, effort: str) -> dict[str, Measured]:
    """Run both stages once."""
    inputs = [word for name, path in sources.items() for word in ("--input", f"{name}={path}")]
    judged = [word for name, path in made.items() for word in ("--input", f"{name}={path}")]
    words = ["--param", f"effort={effort}", "--out"]
    found = {"reference": measure([BIN / "slipway", "stage", "reference", *inputs, *words, root / "reference"])}
    given = ["--input", f"reference={root / 'reference' / 'reference'}"]
    validate = [BIN / "slipway", "stage", "validate", *inputs, *given, *judged, *words, root / "said"]
    found["validate"] = measure(validate, accepted=(0, _NOT_PASSED))
    for name in ("reference", "said"):
        shutil.rmtree(root / name)
    return found


def export(sources: dict[str, Path], root: Path) -> Measured:
    """Run ``slipway export`` of the same four outputs once, with an empty store."""
    level = {"quantization": ["none", "int4"]}
    settings = {
        "checkpoint": {"path": str(sources["adapter"])},
        "base_model": {"name": str(sources["base"])},
        "optimization": {"method": "rtn"},
        "formats": {"pytorch": level, "onnx": level},
        "validation": {"heldout": str(sources["heldout"])} if "heldout" in sources else {},
        "output": {"directory": str(root / "exported")},
    }
    file = root / "export.yaml"
    file.write_text(json.dumps({"export": settings}))
    environment = {"SLIPWAY_HOME": str(root / "home")}
    return measure([BIN / "slipway", "export", "-c", file], environment=environment, accepted=(0, _NOT_PASSED))


def main() -> None:
    """Make the model, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b", help="shape of a model with random weights")
    parser.add_argument("--sample", type=Path, required=True, help="folder of make demo, with a tokenizer and a text")
    parser.add_argument("--trained", action="store_true", help="measure the sample itself")
    parser.add_argument("--efforts", default="quick,standard", help="efforts, separated by commas")
    parser.add_argument("--whole", action="store_true", help="measure slipway export of the same outputs too")
    parser.add_argument("--folder", type=Path, help="where the model and outputs go; about 9 GB")
    arguments = parser.parse_args()
    trained = arguments.sample / "qwen3-base"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder)
        sources = {"base": trained, "adapter": find_checkpoint(arguments.sample / "qwen3-finetuned").path}
        if not arguments.trained:
            measure([sys.executable, "-c", MAKE, root, json.dumps(SHAPES[arguments.shape])])
            sources = {"base": root / "base", "adapter": root / "adapter"}
            for name in TOKENIZER:
                shutil.copy(trained / name, root / "base" / name)
        if (arguments.sample / "heldout").is_dir():
            sources["heldout"] = arguments.sample / "heldout"
        taken = {"export": export(sources, root)} if arguments.whole else {}
        efforts = [effort for effort in arguments.efforts.split(",") if effort]
        made = outputs(sources["base"], sources["adapter"], root) if efforts else {}
        for effort in efforts:
            taken |= {f"{effort}_{stage}": cost for stage, cost in prove(sources, made, root, effort).items()}
    found: dict[str, float] = {}
    for name, cost in taken.items():
        found[f"{name}_seconds"] = cost.seconds
        found[f"{name}_core_seconds"] = cost.core_seconds
        found[f"{name}_peak_anonymous_mb"] = cost.peak_anonymous_bytes / 1e6
    for name, value in found.items():
        print(f"{name:44} {value:10.1f}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "proof.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
