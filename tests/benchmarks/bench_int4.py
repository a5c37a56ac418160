"""4-bit outputs of a real model as a user makes them, beside llama.cpp's own quantizer and AutoRound, in one run.

Usage: ``python tests/benchmarks/bench_int4.py [--real DIR] [--llama DIR] [--peer-python PYTHON] [--only NAME …] [--folder DIR]``. The model is
SmolLM2-135M-Instruct off its grid with its LoRA (``slipway sample --real --off-grid``, made if ``--real`` names none). Rows are

- whole runs of ``slipway export``: with the text of the run (all levels, so that the others' verdicts stand beside), without any, and by
  plain rounding;
- with ``--llama``, a folder of llama.cpp's libraries, its ``llama_model_quantize``, without importance and with that of the same text;
- with ``--peer-python``, the interpreter of an environment with auto-round, 200 iterations with zero points, of the same text.

Each row is judged by its own runtime in float32, on held-out text that none saw: mean Kullback–Leibler divergence in nats from base +
adapter, what it keeps of the base's divergence, and the bytes of its weights. Seconds are those of the stages that made an output of the
merged model or graph (its own and, for four bits, the calibration or importance), or of a peer's whole command. Figures are printed and added to ``results/int4.json``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from bench_quality import AUTOROUND
from format_peers import QUANTIZE
from measure import measure
from safetensors.torch import load_file

from slipway.configuration.calibration import SAMPLE_OF_RUN
from slipway.model.runs.checkpoints import find_checkpoint
from slipway.proof.runtime import LanguageModel, Step
from slipway.sample.real import RealRecipe, make_real_sample
from slipway.sample.real.making import render_conversations
from slipway.settings import Settings

SLIPWAY = Path(sys.executable).with_name("slipway")
RESULTS = Path(__file__).parent / "results" / "int4.json"
TOKENS, THREADS, NOT_PASSED = 128, 2, 4
GROUP, ITERATIONS = 32, 200
Q4_K_M = 15
"""llama.cpp's number of the mixture of types."""
FORMATS = "pytorch:int4,onnx:int4,openvino:int4,gguf:q4_k_m"
EVERY = "pytorch:none+int8+int4,onnx:none+int8+int4,openvino:none+int8+int4,gguf:none+q8_0+q4_k_m"
RUNTIMES = {
    "pytorch": "slipway.proof.transformers_runtime:load",
    "onnx": "slipway_validate.runner.onnx_graphs.load:load",
    "openvino": "slipway_openvino.runtime:load",
    "gguf": "slipway_gguf.runtime:load",
}
WEIGHTS = ("*.safetensors", "model.onnx*", "openvino_model.*", "*.gguf")

WEIGHED = """
import ctypes, sys
from pathlib import Path
import gguf
from safetensors.numpy import load_file
from slipway.machine.cgroup import usable_cores

class Importance(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("values", ctypes.c_void_p), ("count", ctypes.c_size_t)]

class Params(ctypes.Structure):
    _fields_ = [("threads", ctypes.c_int32), ("type", ctypes.c_int32), ("between", ctypes.c_char * 16), ("importance", ctypes.c_void_p),
                ("rest", ctypes.c_char * 224)]

folder, source, target, kind, measured, layers = Path(sys.argv[1]), *sys.argv[2:]
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, int(layers))
found = {names.get_name(name, (".weight",)): values for name, values in load_file(measured).items()}
assert all(values.dtype.name == "float32" for values in found.values())
given = (Importance * (len(found) + 1))(*(Importance(name.encode(), values.ctypes.data, values.size) for name, values in found.items()))
_, ggml, llama = (
    ctypes.CDLL(str(next(folder.glob(name))), mode=ctypes.RTLD_GLOBAL)
    for name in ("libggml-base*.so*", "libggml.*so*", "libllama.*so*")
)
ggml.ggml_backend_load_all_from_path(str(folder).encode())
llama.llama_model_quantize_default_params.restype = Params
params = llama.llama_model_quantize_default_params()
params.threads, params.type, params.importance = usable_cores(), int(kind), ctypes.addressof(given)
sys.exit(llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))
"""
"""llama.cpp's own quantizer with the importance of columns, as ``slipway stage importance`` measures it."""


@dataclass(frozen=True)
class Subject:
    """What all rows are made of.

    Attributes:
        sample: The folder of the sample.
        base, merged: The base, and the model merged in full precision.
        data: The text of the run, as ``slipway stage calibrate`` takes it.
        tokens, exact: Windows that nothing saw, (windows, tokens), and what base + adapter says of them: file of log-probabilities.
        lost: Divergence of the base.
    """

    sample: Path
    base: Path
    merged: Path
    data: Path
    tokens: Path
    exact: Path
    lost: float


Row = dict[str, Any]


@torch.no_grad()
def subject(sample: Path, root: Path) -> Subject:
    """Merge the sample, and compute what base + adapter says of its held-out text."""
    base, run = sample / RealRecipe(off_grid=True).base_name, sample / "run"
    checkpoint = find_checkpoint(run).path
    given = ["--input", f"base={base}", "--input", f"adapter={checkpoint}", "--out", root / "merged"]
    subprocess.run([SLIPWAY, "stage", "merge", *given], check=True, stdout=subprocess.DEVNULL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    texts = [path.read_text(encoding="utf-8") for path in sorted((sample / "heldout").glob("*.txt"))]
    windows = [ids[:TOKENS] for ids in (tokenizer(text)["input_ids"] for text in texts) if len(ids) >= TOKENS]
    tokens = torch.tensor(windows)
    np.save(root / "tokens.npy", tokens.numpy())
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    without = torch.cat([model(one[None]).logits.log_softmax(-1) for one in tokens])
    tuned = peft.PeftModel.from_pretrained(model, checkpoint)
    exact = torch.cat([tuned(one[None]).logits.log_softmax(-1) for one in tokens])
    np.save(root / "exact.npy", exact.numpy())
    data = root / "data"
    data.mkdir()
    lines = (run / SAMPLE_OF_RUN).read_text(encoding="utf-8").splitlines()
    rendered = render_conversations(tokenizer, [json.loads(line)["messages"] for line in lines])
    (data / "calibration.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rendered))
    lost = float((exact.exp() * (exact - without)).sum(-1).mean())
    return Subject(sample, base, root / "merged" / "pytorch", data, root / "tokens.npy", root / "exact.npy", lost)


def divergence(load: str, folder: Path, of: Subject) -> float:
    """Judge an output in a process of its own, as two native runtimes in one may disturb each other."""
    words = [sys.executable, __file__, "--judge", load, folder, of.tokens, of.exact]
    done = subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def judge(load: str, folder: Path, tokens: Path, exact: Path) -> float:
    """Run an output on all windows in the arithmetic of a comparison; return its mean divergence in nats."""
    module, _, name = load.partition(":")
    model: LanguageModel = getattr(importlib.import_module(module), name)(folder, threads=THREADS)
    model.prepare_comparison()
    found = []
    for ids, right in zip(np.load(tokens), np.load(exact, mmap_mode="r"), strict=True):
        row = ids[None].astype(np.int64)
        logits, _ = model.forward(Step(row, np.ones_like(row), np.arange(row.size)[None]))
        said = torch.from_numpy(np.array(logits[0])).float().log_softmax(-1)
        expected = torch.from_numpy(np.array(right))
        found.append(float((expected.exp() * (expected - said)).sum(-1).mean()))
    return sum(found) / len(found)


def stored(folder: Path) -> int:
    """Return the bytes of an output's weights and graphs."""
    return sum(path.stat().st_size for pattern in WEIGHTS for path in folder.glob(pattern))


def row(of: Subject, load: str, folder: Path, **more: float | str) -> Row:
    """Return the figures of an output."""
    lost = divergence(load, folder, of)
    return {"kl": lost, "kept": 1 - lost / of.lost, "bytes": stored(folder), **more}


def export(of: Subject, root: Path, *, formats: str, text: bool, method: str | None) -> dict[str, Row]:
    """Run ``slipway export`` with the text of the run or without; return a row for each output."""
    run = root / "run"
    shutil.copytree(of.sample / "run", run, ignore=None if text else shutil.ignore_patterns(SAMPLE_OF_RUN))
    settings = {"validation.heldout": of.sample / "heldout", "validation.effort": "quick"}
    settings |= {"validation.benchmark_performance": "false"} | (
        # Otherwise an output that fails is made again, calibrated.
        {"optimization.method": method, "validation.on_failure": "fail"} if method else {}
    )
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    given = [run, "--base-model", of.base, "-f", formats, "--out", root / "out", *words]
    home = {"SLIPWAY_HOME": str(root / "home")}
    measure([SLIPWAY, "export", *given], environment=home, accepted=(0, NOT_PASSED))
    (folder,) = (root / "out").iterdir()
    result = json.loads((folder / "report.json").read_text())["result"]
    found = {}
    for name, path in result["paths"].items():
        measuring = "importance" if name.startswith("gguf") else "calibrate-int4"
        own = [
            each["duration_seconds"]
            for each in result["attempts"]
            if each["task"] in (name, f"quantize-{name}")
            or (each["task"].startswith(measuring) and "4" in name and not each["reused"])
        ]
        said = {"seconds": sum(own), "status": result["formats"][name]["status"]}
        found[name] = row(of, RUNTIMES[name.partition("-")[0]], Path(path), **said)
    return found


def own_quantizer(of: Subject, root: Path, llama: Path, *, weighed: bool) -> dict[str, Row]:
    """Quantize by llama.cpp's library, from a file that holds the merged weights exactly."""
    command = [SLIPWAY, "stage", "gguf", "--input", f"pytorch={of.merged}", "--param", "type=bf16", "--out"]
    measure([*command, root / "exact"])
    (exact,) = (root / "exact").glob("**/*.gguf")
    out = root / "made"
    out.mkdir()
    words, seconds = [str(llama), str(exact), str(out / "model.gguf"), str(Q4_K_M)], 0.0
    program = QUANTIZE
    if weighed:
        inputs = ["--input", f"model={of.merged}", "--input", f"data={of.data}"]
        seconds = measure([SLIPWAY, "stage", "importance", *inputs, "--out", root / "importance"]).seconds
        (measured,) = (root / "importance").glob("**/*.safetensors")
        layers = json.loads((of.base / "config.json").read_text())["num_hidden_layers"]
        program, words = WEIGHED, [*words, str(measured), str(layers)]
    seconds += measure([sys.executable, "-c", program, *words]).seconds
    return {"": row(of, RUNTIMES["gguf"], out, seconds=seconds)}


def autoround(of: Subject, root: Path, peer: Path) -> dict[str, Row]:
    """Round by AutoRound in its own environment; its bytes are those of 4 bits, a scale and a zero point for each group."""
    program = AUTOROUND.replace("sym=True", "sym=False")
    given = [of.merged, of.data, root, str(ITERATIONS), str(GROUP), "AutoModelForCausalLM"]
    measured = measure([peer, "-c", program, *given])
    weights = load_file(root / "dense.safetensors")
    model = root / "model"
    shutil.copytree(of.merged, model)
    dense = transformers.AutoModelForCausalLM.from_pretrained(of.merged, dtype=torch.float32)
    total = sum(value.numel() for value in dense.parameters())
    for name, value in weights.items():
        dense.get_parameter(name).data = value
    dense.save_pretrained(model)
    rounded = sum(value.numel() for value in weights.values())
    size = 2 * (total - rounded) + rounded // 2 + rounded // GROUP * 2 + rounded // GROUP // 2
    return {"": row(of, RUNTIMES["pytorch"], model, seconds=measured.seconds) | {"bytes": size}}


def ways(llama: Path | None, peer: Path | None) -> Mapping[str, Callable[[Subject, Path], dict[str, Row]]]:
    """Return all ways to make outputs, by name."""
    made: dict[str, Callable[[Subject, Path], dict[str, Row]]] = {
        "export, text of the run": lambda of, root: export(of, root, formats=EVERY, text=True, method=None),
        "export, no text": lambda of, root: export(of, root, formats=FORMATS, text=False, method=None),
        "export, plain rounding": lambda of, root: export(of, root, formats=FORMATS, text=False, method="rtn"),
    }
    if llama:
        made["llama.cpp q4_k_m"] = lambda of, root: own_quantizer(of, root, llama, weighed=False)
        made["llama.cpp q4_k_m, importance"] = lambda of, root: own_quantizer(of, root, llama, weighed=True)
    if peer:
        made[f"AutoRound {ITERATIONS}"] = lambda of, root: autoround(of, root, peer)
    return made


def main() -> None:
    """Make all rows, print and write them; with ``--judge``, judge one output."""
    if sys.argv[1:2] == ["--judge"]:
        load, *paths = sys.argv[2:]
        print(judge(load, *map(Path, paths)))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--real", type=Path, help="a folder that `slipway sample --real --off-grid` has made")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's libraries")
    parser.add_argument("--peer-python", type=Path, help="interpreter of an environment with auto-round")
    names = list(ways(Path(), Path()))
    parser.add_argument("--only", nargs="*", choices=names, help="ways to make outputs; all if not given")
    parser.add_argument("--folder", type=Path, help="where the outputs are made")
    arguments = parser.parse_args()
    every = ways(*(path and path.absolute() for path in (arguments.llama, arguments.peer_python)))
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    RESULTS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        sample = arguments.real
        if sample is None:
            sample, home = Path(made) / "sample", Settings.from_environment(os.environ).home
            make_real_sample(sample, home=home, recipe=RealRecipe(off_grid=True))
        of = subject(sample.absolute(), Path(made))
        print(f"the base is {of.lost:.3f} nats away\n{'':44} {'KL':>7} {'kept':>6} {'MB':>6} {'s':>6}")
        for name, way in every.items():
            if name not in (arguments.only or every):
                continue
            root = Path(made) / "way"
            root.mkdir()
            figures = way(of, root)
            shutil.rmtree(root)
            for output, one in figures.items():
                label = f"{name}: {output}" if output else name
                seconds, size = one["seconds"], one["bytes"] / 1e6
                figures_of = f"{one['kl']:7.4f} {one['kept']:6.1%} {size:6.1f} {seconds:6.0f}"
                print(f"{label:44} {figures_of} {one.get('status', '')}", flush=True)
            known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
            RESULTS.write_text(json.dumps(known | {name: figures, "base": of.lost}, indent=2) + "\n")


if __name__ == "__main__":
    main()
