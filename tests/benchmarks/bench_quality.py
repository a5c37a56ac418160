"""Calibrated int4 against its peers: what quantization adds to a fine-tuned model, and what that costs.

Usage: ``python tests/benchmarks/bench_quality.py [--sample DIR] [--group 32] [--only NAME …] [--peer-python PYTHON]``. The model is the
sample of ``slipway sample``, merged; without ``--sample`` it is trained first. All calibrate with text that the adapter was trained on
and are judged on text that neither saw: mean Kullback–Leibler divergence in nats from the merged model and top-1 agreement over 64
windows of 128 tokens, computed in float32 by transformers with the weights that each returns. Compared are

- round-to-nearest and each method of ``slipway stage calibrate``, without the lm_head, with it, and with the embedding that is tied to it
  on the same codes, as ONNX stores them;
- with ``--peer-python``, the interpreter of an environment with auto-round, AutoRound with 0 and 200 iterations, which leaves the head.

All are whole commands with their imports. Beside wall time stands the time that cores worked, which other processes change less.
Figures are printed and written to ``results/quality.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Measured, measure
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipway.sample import make_sample
from slipway.sample.corpus import python_sources

RESULTS = Path(__file__).parent / "results"
SLIPWAY = Path(sys.executable).with_name("slipway")
WINDOWS, TOKENS = 64, 128

AUTOROUND = """
import json, sys, torch
from auto_round import AutoRound
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
source, data, target, iterations, group = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
torch.set_num_threads(2)
tokenizer = AutoTokenizer.from_pretrained(source)
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
ids = [token for line in open(data + "/calibration.jsonl") for token in tokenizer(json.loads(line)["text"])["input_ids"]]
windows = torch.tensor(ids[: len(ids) // 128 * 128]).reshape(-1, 128)
chosen = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[:256]]
rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in chosen]
rounded, _ = AutoRound(model, tokenizer, bits=4, group_size=group, sym=True, nsamples=256, seqlen=128, batch_size=8,
                       iters=iterations, dataset=rows, device_map="cpu", enable_torch_compile=False).quantize()
weights = {name: value.detach().float().contiguous() for name, value in rounded.named_parameters() if name.endswith("proj.weight")}
save_file(weights, target + "/dense.safetensors")
"""

Words = list[str | Path]
Weights = dict[str, torch.Tensor]


def calibrate(source: Path, data: Path, out: Path, *, method: str, head: bool, group: int) -> Words:
    """The stage that calibrates."""
    words: Words = [
        SLIPWAY,
        "stage",
        "calibrate",
        "--input",
        f"model={source}",
        "--input",
        f"data={data}",
        "--out",
        out,
    ]
    params = {"method": method, "head": str(head).lower(), "group_size": str(group)}
    return [*words, *(word for name, value in params.items() for word in ("--param", f"{name}={value}"))]


def calibrated(out: Path) -> Weights:
    """Weights that the stage's codes stand for."""
    found = load_file(out / "calibration" / "weights.safetensors")
    made = {}
    for name in [name.removesuffix(".codes") for name in found if name.endswith(".codes")]:
        codes, scales = found[f"{name}.codes"].float(), found[f"{name}.scales"]
        made[name] = codes * scales.repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)
    return made


class Judge:
    """Compares models with rounded weights with the exact one on held-out text."""

    def __init__(self, source: Path, heldout: Path) -> None:
        self._source = source
        ids = AutoTokenizer.from_pretrained(source)(heldout.read_text(encoding="utf-8"))["input_ids"]
        self._windows = torch.tensor(ids[: WINDOWS * TOKENS]).reshape(WINDOWS, TOKENS)
        self._exact = self._results({}, embedding=False)

    def compare(self, weights: Weights, *, embedding: bool = False) -> tuple[float, float]:
        """Return mean divergence and top-1 agreement; with ``embedding`` the head's weight is the embedding's too."""
        other = self._results(weights, embedding=embedding)
        divergence = (self._exact.exp() * (self._exact - other)).sum(-1).mean()
        return float(divergence), float((self._exact.argmax(-1) == other.argmax(-1)).float().mean())

    @torch.no_grad()
    def _results(self, weights: Weights, *, embedding: bool) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(self._source, dtype=torch.float32).eval()
        head = model.get_output_embeddings()
        if not embedding:
            head.weight = torch.nn.Parameter(head.weight.detach().clone())  # untied
        for name, value in weights.items():
            model.get_parameter(name).data = value
        if embedding and "lm_head.weight" in weights:
            model.get_input_embeddings().weight.data = weights["lm_head.weight"]
        return torch.cat([model(part).logits.log_softmax(-1) for part in self._windows.split(16)])


def prepare(root: Path, sample: Path | None) -> tuple[Path, Path, Path]:
    """Train the sample if it is not given, merge it, and write the adapter's training text; return model, data and held-out text."""
    if sample is None:
        sample = root / "sample"
        make_sample(sample)
    checkpoint = max((sample / "qwen3-finetuned").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    inputs: Words = ["--input", f"base={sample / 'qwen3-base'}", "--input", f"adapter={checkpoint}"]
    measure([SLIPWAY, "stage", "merge", *inputs, "--out", root / "merged"])
    data = root / "data"
    data.mkdir()
    lines = (json.dumps({"text": text}) + "\n" for text in python_sources().training)
    (data / "calibration.jsonl").write_text("".join(lines), encoding="utf-8")
    (data / "profile.json").write_text("{}")
    return root / "merged" / "pytorch", data, sample / "heldout" / "heldout.txt"


def row(judge: Judge, measured: Measured, weights: Weights) -> dict[str, Any]:
    """Return the figures of one way to round."""
    divergence, top1 = judge.compare(weights)
    figures = {"kl": divergence, "top1": top1}
    if "lm_head.weight" in weights:
        figures["kl_with_embedding"], figures["top1_with_embedding"] = judge.compare(weights, embedding=True)
    peak = measured.peak_anonymous_bytes / 1e9
    return {**figures, "seconds": measured.seconds, "core_seconds": measured.core_seconds, "peak_gb": peak}


def ways(
    source: Path, data: Path, peer: Path | None, group: int
) -> dict[str, Callable[[Path], tuple[Measured, Weights]]]:
    """Return all ways to round, by name; each takes an empty folder."""

    def own(method: str, head: bool) -> Callable[[Path], tuple[Measured, Weights]]:
        def run(out: Path) -> tuple[Measured, Weights]:
            out.rmdir()
            return measure(calibrate(source, data, out, method=method, head=head, group=group)), calibrated(out)

        return run

    def autoround(iterations: int) -> Callable[[Path], tuple[Measured, Weights]]:
        def run(out: Path) -> tuple[Measured, Weights]:
            assert peer is not None
            measured = measure([peer, "-c", AUTOROUND, source, data, out, str(iterations), str(group)])
            return measured, load_file(out / "dense.safetensors")

        return run

    methods = ("rtn", "awq", "gptq", "auto")
    found = {f"{method}{' + head' * head}": own(method, head) for head in (False, True) for method in methods}
    return found | ({f"AutoRound {count}": autoround(count) for count in (0, 200)} if peer else {})


def main() -> None:
    """Round in all ways, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=Path, help="a folder that `slipway sample` has made")
    parser.add_argument("--group", type=int, default=32, help="weights per scale")
    parser.add_argument("--only", nargs="*", help="ways to round; all if not given")
    parser.add_argument("--peer-python", type=Path, help="interpreter of an environment with auto-round")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        source, data, heldout = prepare(root, arguments.sample)
        judge = Judge(source, heldout)
        peer = arguments.peer_python and arguments.peer_python.absolute()
        print(f"{'':14} {'KL':>9} {'top-1':>7} {'KL + emb.':>9} {'core s':>7} {'wall s':>7} {'GB':>5}")
        for name, way in ways(source, data, peer, arguments.group).items():
            if arguments.only and name not in arguments.only:
                continue
            out = root / "out"
            out.mkdir()
            one = found[name] = row(judge, *way(out))
            shutil.rmtree(out)
            also = f"{one['kl_with_embedding']:.2e}" if "kl_with_embedding" in one else ""
            costs = f"{one['core_seconds']:7.0f} {one['seconds']:7.0f} {one['peak_gb']:5.2f}"
            print(f"{name:14} {one['kl']:9.2e} {one['top1']:7.2%} {also:>9} {costs}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quality.json").write_text(json.dumps({"group_size": arguments.group, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
