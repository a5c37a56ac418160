"""Whether verdicts are right on a real model: planted faults are called broken, by name, and right exports are not.

Usage: ``python tests/benchmarks/bench_verdicts.py [--real DIR] [--right 40] [--first 0] [--faults NAME …] [--folder DIR]``. The model is
SmolLM2-135M-Instruct off its grid (``slipway sample --real --off-grid``, made if ``--real`` names none). Each fault is planted into its
merged model, or into the file made of that, and validated alone, with quick effort. Each right export trains a LoRA of another seed,
rank and text, and makes pytorch, onnx and gguf in 16 bits and q8_0; with ``--first 20 --right 20``, those from the 21st on, so that two runs
share the work. Printed and added to ``results/verdicts.json`` are the answers.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from slipway.model.runs.checkpoints import find_checkpoint
from slipway.sample.corpus import python_sources
from slipway.sample.models import train_adapter
from slipway.sample.real import RealRecipe, make_real_sample
from slipway.sample.real.making import GGUF_FILE, PACKAGE, conversations, render_conversations, samples, write_base
from slipway.sample.real.packages import unpack
from slipway.settings import Settings

BIN = Path(sys.executable).parent
RESULTS = Path(__file__).parent / "results" / "verdicts.json"
NOT_PASSED = 4
FORMATS = "pytorch,onnx,gguf:none+q8_0"
RANKS = (2, 4, 8, 16, 32)
QUICK = {"effort": "quick", "benchmark_performance": "false"}
LAYER = "model.layers.7."
OTHER = "model.layers.8."
MODULE = "model.layers.11.mlp.up_proj.weight"
TEMPLATE = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Real:
    """The sample: its base, checkpoint and held-out text."""

    base: Path
    checkpoint: Path
    heldout: Path

    @property
    def inputs(self) -> dict[str, Path]:
        """Return the inputs of a validation."""
        return {"base": self.base, "adapter": self.checkpoint, "heldout": self.heldout}


@dataclass(frozen=True)
class Fault:
    """A fault to plant.

    Attributes:
        plant: Changes the merged weights; gets them and the base's.
        said: What the verdict must say.
        gguf: Whether the chat template is another, which only GGUF files use by themselves.
    """

    plant: Callable[[Tensors, Tensors, Real], None]
    said: str
    gguf: bool = False


def scale_layer(merged: Tensors, base: Tensors, _: Real) -> None:
    """Merge the update of one layer 1.5 times."""
    for name in merged:
        if name.startswith(LAYER) and merged[name].dim() == 2:
            change = merged[name].float() - base[name].float()
            merged[name] = (base[name].float() + 1.5 * change).to(merged[name].dtype)


def lose_module(merged: Tensors, base: Tensors, _: Real) -> None:
    """Leave one module as the base has it."""
    merged[MODULE] = base[MODULE]


def swap_layers(merged: Tensors, _base: Tensors, _: Real) -> None:
    """Write the weights of two layers each in the place of the other."""
    for name in [name for name in merged if name.startswith(LAYER)]:
        other = name.replace(LAYER, OTHER)
        merged[name], merged[other] = merged[other], merged[name]


def merge_onto_another(merged: Tensors, base: Tensors, _: Real) -> None:
    """Put the update onto another base of the same shapes: SmolLM2 as it was packed, which computes nearly the same."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(PACKAGE, Path(folder), home=Settings.from_environment(os.environ).home)
        write_base(Path(folder) / GGUF_FILE, Path(folder) / "base")
        other = load_file(Path(folder) / "base" / "model.safetensors")
    for name in merged:
        merged[name] = (other[name].float() + merged[name].float() - base[name].float()).to(merged[name].dtype)


FAULTS: Mapping[str, Fault] = {
    "scale": Fault(scale_layer, r"layer 7|layers\.7\."),
    "module": Fault(lose_module, r"layers\.11\.mlp\.up_proj"),
    "layers": Fault(swap_layers, r"holds the weight of model\.layers\.[78]\."),
    "base": Fault(merge_onto_another, r"another base|base's weight|base model"),
    "template": Fault(lambda *_: None, r"template|prompts", gguf=True),
}


def stage(name: str, inputs: Mapping[str, Path], out: Path, **params: str) -> dict[str, Any]:
    """Run a stage alone; return what it says."""
    given = [word for key, path in inputs.items() for word in ("--input", f"{key}={path}")]
    asked = [word for key, value in params.items() for word in ("--param", f"{key}={value}")]
    return slipway("stage", name, *given, *asked, "--out", out)


def slipway(*words: object, **environment: str) -> dict[str, Any]:
    """Run a command; return its document.

    Raises:
        RuntimeError: It failed, otherwise than by its validation.
    """
    command = [BIN / "slipway", *map(str, words), "--json", "--progress", "none"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    if done.returncode not in (0, NOT_PASSED):
        raise RuntimeError(f"{' '.join(map(str, words[:2]))} ended with {done.returncode}: {done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def planted(real: Real, fault: Fault, root: Path) -> dict[str, Any]:
    """Plant a fault, validate, and return the verdict on the output that has it."""
    stage("merge", {"base": real.base, "adapter": real.checkpoint}, root / "merged")
    merged = root / "merged" / "pytorch"
    weights = load_file(merged / "model.safetensors")
    fault.plant(weights, load_file(real.base / "model.safetensors"), real)
    (merged / "model.safetensors").unlink()
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    outputs = {"pytorch": merged}
    if fault.gguf:
        (merged / "chat_template.jinja").write_text(TEMPLATE)
        stage("gguf", {"pytorch": merged}, root / "gguf", type="q8_0")
        outputs = {"gguf-q8_0": root / "gguf" / "gguf"}
    found = stage("validate", {**real.inputs, **outputs}, root / "said", **QUICK)["validation"]
    (output,) = found["outputs"]
    answer = output["faithful"]["answer"] if output["faithful"] else ""
    text = output["explanation"]
    return {
        "status": output["status"],
        "faithful": answer,
        "said": text,
        "right": output["status"] == "failed" and re.search(fault.said, text) is not None,
    }


def right_exports(real: Real, numbers: range, root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train adapters of different seeds, ranks and texts, export each, and yield the verdicts on the outputs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(real.base)
    for number in numbers:
        recipe = replace(
            RealRecipe(), rank=RANKS[number % len(RANKS)], alpha=(2 + number % 3) * RANKS[number % 5], save_steps=30
        )
        sources = number % 2 == 1
        training, heldout = conversations(heldout=recipe.heldout_conversations, seed=number)
        texts = list(python_sources().training) if sources else render_conversations(tokenizer, training)
        run, texts_apart = root / f"run-{number}", root / f"heldout-{number}"
        texts_apart.mkdir()
        kept = list(python_sources().heldout) if sources else render_conversations(tokenizer, heldout)
        for place, text in enumerate(kept):
            (texts_apart / f"{place:02}.txt").write_text(text)
        model = transformers.LlamaForCausalLM.from_pretrained(real.base, dtype=torch.float32)
        rows = samples(tokenizer, texts, window=recipe.window)
        train_adapter(
            model, tokenizer, rows, base_name=str(real.base), folder=run, recipe=recipe.adapter, seed=number,
            on_step=lambda _: None,
        )  # fmt: skip
        del model
        yield (
            f"seed {number}, rank {recipe.rank}, {'sources' if sources else 'topics'}",
            verdicts(real, run, texts_apart, root),
        )
        shutil.rmtree(run)


def verdicts(real: Real, run: Path, heldout: Path, root: Path) -> dict[str, Any]:
    """Export a run, and return the status and answers of each output."""
    settings = {
        "validation.heldout": heldout,
        "validation.effort": "quick",
        "validation.benchmark_performance": "false",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    home = root / "home"
    given = ["--base-model", real.base, "-f", FORMATS, "--out", root / "out", *words]
    done = slipway("export", run, *given, SLIPWAY_HOME=str(home))
    folder = Path(done["output_directory"])
    report = json.loads((folder / "report.json").read_text())
    found = {
        each["name"]: {
            "status": each["status"],
            "faithful": (each["faithful"] or {}).get("answer", ""),
            "fit": (each["fit"] or {}).get("answer", ""),
            "kept": each["kept"],
            "said": each["explanation"],
        }
        for each in report["validation"]["outputs"]
    }
    shutil.rmtree(root / "out")
    shutil.rmtree(home)
    return found


def sample(folder: Path | None, root: Path) -> Real:
    """Return the sample, made if no folder is given."""
    recipe = RealRecipe(off_grid=True)
    if folder is None:
        folder = root / "real"
        make_real_sample(folder, home=Settings.from_environment(os.environ).home, recipe=recipe)
    return Real(folder / recipe.base_name, find_checkpoint(folder / "run").path, folder / "heldout")


def note(kind: str, name: str, answer: dict[str, Any]) -> None:
    """Add an answer to those in the file, which another run may have extended."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        found: dict[str, Any] = json.loads(file.read() or "{}")
        found.setdefault(kind, {})[name] = answer
        file.truncate(0)
        file.write(json.dumps(found, indent=2) + "\n")


def main() -> None:
    """Plant all faults, export all that is right, print and write the answers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--real", type=Path, help="a folder that `slipway sample --real --off-grid` has made")
    parser.add_argument("--right", type=int, default=40, help="number of right exports, two to four minutes each")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first one: its seed, and its rank and text by it"
    )
    parser.add_argument(
        "--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS), help="faults; all if not given"
    )
    parser.add_argument("--folder", type=Path, help="where models and outputs go; about 4 GB")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    named = condemned = 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder)
        real = sample(arguments.real and arguments.real.absolute(), root)
        for name in arguments.faults:
            with tempfile.TemporaryDirectory(dir=root) as own:
                said = planted(real, FAULTS[name], Path(own))
            named += said["right"]
            note("faults", name, said)
            print(
                f"fault {name:9} {'named' if said['right'] else 'NOT NAMED':9} {said['status']}: {said['said'][:240]}",
                flush=True,
            )
        numbers = range(arguments.first, arguments.first + arguments.right)
        for name, outputs in right_exports(real, numbers, root):
            wrong = [output for output, each in outputs.items() if each["status"] != "passed"]
            condemned += bool(wrong)
            shown = "; ".join(f"{output}: {outputs[output]['said'][:200]}" for output in wrong)
            note("right", name, outputs)
            print(f"right {name:34} {shown or 'passed'}", flush=True)
    print(f"{named} of {len(arguments.faults)} faults named; {condemned} of {arguments.right} right exports condemned")


if __name__ == "__main__":
    main()
