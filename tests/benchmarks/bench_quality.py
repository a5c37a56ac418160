"""Calibrated int4 against its peers: what quantization adds to trained models, and what that costs.

Usage: ``python tests/benchmarks/bench_quality.py [--real DIR] [--sample DIR] [--models NAME …] [--group 32] [--only NAME …] [--peer-python PYTHON]
[--genai-python PYTHON]``. The models are SmolLM2 off its grid (``slipway sample --real --off-grid``) and the sample of ``slipway sample``, each merged; a Llama with a head of its own; and a BERT that
classifies (``quality_models.py`` trains them). Peers calibrate with the same text, and all are judged on text that none saw: mean
Kullback–Leibler divergence in nats from the exact model, and top-1 agreement. Compared are

- round-to-nearest and each method of ``slipway stage calibrate``, without the lm_head, with it, and with the embedding that is tied to it
  on the same codes, as ONNX stores them;
- with ``--peer-python``, the interpreter of an environment with auto-round, AutoRound with 0 and 200 iterations, which leaves the head;
- with ``--genai-python``, that of an environment with onnxruntime-genai, its builder's int4, run by ONNX Runtime. It knows decoders only.

All are whole commands with their imports. Beside wall time stands the time that cores worked, which other processes change less.
Figures are printed and added to ``results/quality.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import Measured, measure
from quality_judge import HEAD, Judge, calibrated
from quality_models import SLIPWAY, SUBJECTS, Subject
from safetensors.torch import load_file

RESULTS = Path(__file__).parent / "results" / "quality.json"

AUTOROUND = """
import json, sys, torch, transformers
from auto_round import AutoRound
from safetensors.torch import save_file
source, data, target, iterations, group, kind = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6]
torch.set_num_threads(2)
tokenizer = transformers.AutoTokenizer.from_pretrained(source)
model = getattr(transformers, kind).from_pretrained(source, dtype=torch.float32)
texts = [tokenizer(json.loads(line)["text"])["input_ids"] for line in open(data + "/calibration.jsonl")]
if kind == "AutoModelForCausalLM":
    ids = [token for text in texts for token in text]
    windows = torch.tensor(ids[: len(ids) // 128 * 128]).reshape(-1, 128)
else:
    length = min(map(len, texts))
    windows = torch.tensor([text[:length] for text in texts])
chosen = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[:256]]
rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in chosen]
before = {name: value.detach().clone() for name, value in model.named_parameters()}
rounded, _ = AutoRound(model, tokenizer, bits=4, group_size=group, sym=True, nsamples=256, seqlen=chosen.shape[1], batch_size=8,
                       iters=iterations, dataset=rows, device_map="cpu", enable_torch_compile=False).quantize()
weights = {name: value.detach().float().contiguous() for name, value in rounded.named_parameters()
           if value.dim() == 2 and not torch.equal(value.detach().float(), before[name].float())}
assert weights, "nothing was rounded"
save_file(weights, target + "/dense.safetensors")
"""

Way = Callable[[Subject, Path], dict[str, Any]]


def calibrate(method: str, *, head: bool, group: int) -> Way:
    """The stage that calibrates."""

    def run(subject: Subject, out: Path) -> dict[str, Any]:
        out.rmdir()
        params = {"method": method, "head": str(head).lower(), "group_size": str(group)}
        words = [SLIPWAY, "stage", "calibrate", "--input", f"model={subject.source}", "--input", f"data={subject.data}"]
        given = [word for name, value in params.items() for word in ("--param", f"{name}={value}")]
        measured = measure([*words, "--out", out, *given])
        weights, judge = calibrated(out), Judge(subject)
        divergence, top1 = judge.compare(weights)
        found = {"kl": divergence, "top1": top1}
        if HEAD in weights and "tied" in subject.described:
            found["kl_with_embedding"], found["top1_with_embedding"] = judge.compare(weights, embedding=True)
        return found | _costs(measured)

    return run


def autoround(peer: Path, iterations: int, *, group: int) -> Way:
    """AutoRound in an environment of its own."""

    def run(subject: Subject, out: Path) -> dict[str, Any]:
        given = [subject.source, subject.data, out, str(iterations), str(group), subject.auto_class]
        measured = measure([peer, "-c", AUTOROUND, *given])
        divergence, top1 = Judge(subject).compare(load_file(out / "dense.safetensors"))
        return {"kl": divergence, "top1": top1, **_costs(measured)}

    return run


def genai(peer: Path, *, group: int) -> Way:
    """The builder of onnxruntime-genai in an environment of its own."""

    def run(subject: Subject, out: Path) -> dict[str, Any]:
        words = [
            peer,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            subject.source,
            "-o",
            out / "result",
            "-e",
            "cpu",
        ]
        options = [
            f"int4_block_size={group}",
            "int4_accuracy_level=1",
        ]  # computed in float32: what rounding adds, not the kernel
        measured = measure([*words, "-p", "int4", "-c", out / "cache", "--extra_options", *options])
        divergence, top1 = Judge(subject).compare_graph(out / "result" / "model.onnx")
        return {"kl": divergence, "top1": top1, **_costs(measured)}

    return run


def _costs(measured: Measured) -> dict[str, float]:
    peak = measured.peak_anonymous_bytes / 1e9
    return {"seconds": measured.seconds, "core_seconds": measured.core_seconds, "peak_gb": peak}


def ways(group: int, *, peer: Path | None, builder: Path | None) -> dict[str, Way]:
    """Return all ways to round, by name; each takes a model and an empty folder, and returns its figures."""
    found: dict[str, Way] = {
        f"{method}{' + head' * head}": calibrate(method, head=head, group=group)
        for head in (False, True)
        for method in ("rtn", "awq", "gptq", "auto")
    }
    if peer:
        found |= {f"AutoRound {count}": autoround(peer, count, group=group) for count in (0, 200)}
    if builder:
        found["genai int4"] = genai(builder, group=group)
    return found


def shown(name: str, one: dict[str, Any]) -> str:
    """Return a line of the table."""
    if "failed" in one:
        return f"{name:14} {one['failed']}"
    also = f"{one['kl_with_embedding']:.2e}" if "kl_with_embedding" in one else ""
    costs = f"{one['core_seconds']:7.0f} {one['seconds']:7.0f} {one['peak_gb']:5.2f}"
    return f"{name:14} {one['kl']:9.2e} {one['top1']:7.2%} {also:>9} {costs}"


def compare(subject: Subject, root: Path, chosen: dict[str, Way]) -> dict[str, Any]:
    """Round a model in all ways; a peer that does not take it is told by its last words."""
    found: dict[str, Any] = {}
    for name, way in chosen.items():
        if "head" in name and subject.auto_class != "AutoModelForCausalLM":
            continue
        out = root / "out"
        out.mkdir()
        try:
            found[name] = way(subject, out)
        except RuntimeError as error:
            if name.split()[0] not in ("AutoRound", "genai"):
                raise
            found[name] = {"failed": str(error).strip().splitlines()[-1][:160]}
        shutil.rmtree(out, ignore_errors=True)
        print(shown(name, found[name]), flush=True)
    return found


def known(group: int) -> dict[str, Any]:
    """Return the figures of earlier runs with this group size, to which this one adds its own."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return found if found.get("group_size") == group else {"group_size": group}


def main() -> None:
    """Round in all ways, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--real", type=Path, help="a folder that `slipway sample --real --off-grid` has made")
    parser.add_argument("--sample", type=Path, help="a folder that `slipway sample` has made")
    parser.add_argument(
        "--models", nargs="*", default=list(SUBJECTS), choices=list(SUBJECTS), help="models; all if not given"
    )
    parser.add_argument("--group", type=int, default=32, help="weights per scale")
    parser.add_argument("--only", nargs="*", help="ways to round; all if not given")
    parser.add_argument("--peer-python", type=Path, help="interpreter of an environment with auto-round")
    parser.add_argument("--genai-python", type=Path, help="interpreter of an environment with onnxruntime-genai")
    arguments = parser.parse_args()
    peer, builder = (path and path.absolute() for path in (arguments.peer_python, arguments.genai_python))
    every = ways(arguments.group, peer=peer, builder=builder)
    chosen = {name: way for name, way in every.items() if name in (arguments.only or every)}
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as made:
            subject = SUBJECTS[model](Path(made), {"smollm2": arguments.real, "sample": arguments.sample}.get(model))
            print(
                f"{subject.described}\n{'':14} {'KL':>9} {'top-1':>7} {'KL + emb.':>9} {'core s':>7} {'wall s':>7} {'GB':>5}"
            )
            figures = compare(subject, Path(made), chosen)
        found = known(arguments.group)
        found.setdefault(model, {}).update(figures)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
