"""All formats in one export: each passes in its own runtime, one table compares them, and the examples of the card run."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipway.formats.registry import formats
from support.commands.cli import Done, slipway
from support.commands.usage_examples import usage_examples
from support.coordinators.own_environments import VARIABLE, own_environments, site_of
from support.models.trained_translator import SENTENCES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

LIBRARIES = {
    "gguf": "xllamacpp", "openvino": "openvino", "executorch": "executorch", "litert": "litert_torch", "adapter": "peft", "onnx": "onnxruntime",
    "torchscript": "torch", "torch_export": "torch", "pytorch": "torch", "coreml": "coremltools", "tensorrt_llm": "ml_dtypes", "tensorrt": "tensorrt_rtx",
}  # fmt: skip
"""The library without which a format is left out, unless its extra has an environment of its own."""
APART = {name: command for name, command in own_environments().items() if name in LIBRARIES}
PRESENT = tuple(name for name, library in LIBRARIES.items() if name in APART or importlib.util.find_spec(library))
NOT_RUN = {
    "coreml": sys.platform != "darwin", "tensorrt_llm": True, "tensorrt": shutil.which("nvidia-smi") is None,
    "executorch": importlib.util.find_spec("executorch") is None,
}  # fmt: skip
"""Formats whose runtime may lack what it needs of the machine: then an output is delivered as *not run*."""
LEVELS = {
    "gguf": ("q4_k_m",), "openvino": ("int4",), "executorch": ("8da4w",), "litert": ("int8",), "coreml": ("int8",)
}  # fmt: skip
LIMITS = {"none": 1e-4, "int8": 1e-3, "q4_k_m": 2e-2, "int4": 2e-2, "8da4w": 2e-2}
"""Largest mean KL from base + adapter, by level."""
BESIDE = tuple(name for name in ("onnx", "gguf") if name in PRESENT)
"""Formats beside whose output of the base the adapter is delivered too."""
NO_ENCODERS = frozenset({"gguf", "adapter-gguf", "tensorrt_llm"})
NO_PAIRS = NO_ENCODERS | {"tensorrt", "executorch", "litert", "coreml", "torchscript", "torch_export"}
"""Outputs that are refused of an encoder, and of an encoder–decoder."""
COLUMNS = ("Validation", "Size", "Mean KL", "Load, at most", "Against PyTorch", "Memory")


def test_a_format_is_left_out_below_only_without_its_library() -> None:
    assert formats().keys() >= set(PRESENT)
    absent = {name: library for name, library in LIBRARIES.items() if name not in PRESENT}
    if absent:
        pytest.skip(f"not tested, because these are not installed, and {VARIABLE} names no environment: {absent}")


def exported(root: Path, *words: str | Path, levels: dict[str, tuple[str, ...]]) -> Any:
    settings = {"formats.tensorrt.targets": "sm89", "optimization.quantization": "none"}
    settings |= {f"formats.{name}.enabled": str(name in PRESENT).lower() for name in LIBRARIES}
    settings |= {f"formats.{name}.quantization": ",".join(levels[name]) for name in levels if name in PRESENT}
    settings |= {f"formats.{name}.quantization": "none" for name in ("pytorch", "onnx")}
    if "adapter" in PRESENT:
        settings["formats.adapter.targets"] = ",".join(("peft", *BESIDE))
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words = ("export", "--json", *words, "--out", root / "out", *flags)
    if not APART:
        return slipway(*words, home=root / "home", timeout=2400)
    (root / "site").mkdir(parents=True)
    with site_of(root / "site", APART) as site:
        done = slipway(*words, "--coordinator", site.address, home=root / "home", timeout=2400)
        assert done.json.get("formats"), done.out[-3000:] + done.err[-3000:]
        ran = site.ran(done.json["export_id"])
        assert {name: ran[name] for name in APART if name in ran} == {name: {name} for name in APART if name in ran}
        return done


def outputs(levels: dict[str, tuple[str, ...]]) -> set[str]:
    """Return the names of all outputs that can be made here."""
    named = {each for name in PRESENT for each in (name, *(f"{name}-{level}" for level in levels.get(name, ())))}
    return named | ({f"adapter-{name}" for name in BESIDE} if "adapter" in PRESENT else set())


def table(page: Path) -> dict[str, dict[str, str]]:
    """Return the cells of the report's comparison, by output and column; an output that was refused has one wide cell."""
    body = page.read_text().partition("<h2>Formats</h2>")[2].partition("</table>")[0]
    plain = [
        [re.sub("<[^>]*>", "", cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr.*?</tr>", body, re.DOTALL)
    ]
    return {name: dict(zip(plain[0][1:], cells, strict=False)) for name, *cells in plain[1:]}


def run_examples(folder: Path, beside: Path) -> dict[str, str]:
    """Run the card's example of each output from the output directory, with the base model where the adapter names it."""
    shutil.copytree(beside, folder / beside.name)
    names = usage_examples((folder / "README.md").read_text())
    return {name: run_example(folder, name) for name in names if not NOT_RUN.get(name.partition("-")[0])}


def run_example(folder: Path, name: str) -> str:
    code = usage_examples((folder / "README.md").read_text())[name]
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
    return done.stdout.strip()


def check_delivery(result: dict[str, Any], made: set[str]) -> Path:
    """Check verdicts, the table, the card and the lineage; return the output directory."""
    folder = Path(result["output_directory"])
    absent = {name for name in made if NOT_RUN.get(name.partition("-")[0])}
    assert {name: each["status"] for name, each in result["formats"].items()} == {
        name: "not_run" if name in absent else "passed" for name in made
    }
    validation = json.loads((folder / "report.json").read_text())["validation"]
    for output in validation["outputs"]:
        if output["name"] in absent:
            assert re.search(
                "needs Core ML|no NVIDIA GPU|tensorrt runs only decoder|needs an engine that TensorRT-LLM",
                output["status_reason"],
            ), output
            continue
        assert output["to_reference"]["mean_kl"] < LIMITS.get(output["level"], LIMITS["none"]), output["name"]
        assert output["load_seconds"] > 0
        if output["texts"]:
            assert output["texts"]["texts"] > 40
            assert output["texts"]["different"] == output["texts"]["rendered_otherwise"] == 0
    shown = table(folder / "report.html")
    assert shown.keys() >= made
    assert shown["PyTorch, base + adapter, unmerged"]["Against PyTorch"] == "1"
    assert {shown[name]["Validation"] for name in absent} <= {"not run here"}
    missing = [(name, column) for name in made - absent for column in COLUMNS if shown[name].get(column, "–") == "–"]
    assert missing == []
    assert json.loads((folder / "lineage.json").read_text())["outputs"].keys() == {*made, "validation"}
    card = (folder / "README.md").read_text()
    alone = [name for name in ("adapter", "adapter-gguf") if name in made]
    named = " and ".join(f"`{name}`" for name in alone)
    assert (f"Each folder but {named} is complete on its own" in card) is bool(alone)
    for name in alone:  # it is far smaller than any model, because it is none
        assert result["formats"][name]["reduction_percent"] is None
        assert result["optimized_size_bytes"] > result["formats"][name]["size_bytes"]
    return folder


def test_the_sample_in_every_format(sample: Path, tmp_path: Path) -> None:
    made = outputs(LEVELS)
    done = exported(tmp_path, "-c", sample / "export.yaml", levels=LEVELS | {"gguf": ("f16", *LEVELS["gguf"])})
    assert done.code == 0, done.err[-3000:]
    folder = check_delivery(done.json, made)
    if "gguf" in made:
        assert (folder / "gguf" / "Modelfile").is_file()
        texts = {
            each["name"]: each["texts"]
            for each in json.loads((folder / "report.json").read_text())["validation"]["outputs"]
        }
        assert all(texts[name] for name in made if "gguf" in name)
    if "adapter-gguf" in made:
        from support.models.gguf_models import write_gguf

        file, _ = write_gguf(sample / "qwen3-base", tmp_path / "plain")
        shutil.copy(file, folder / "adapter-gguf" / "base.gguf")
    if "tensorrt_llm" in made:
        code = usage_examples((folder / "README.md").read_text())["tensorrt_llm"]
        assert ast.parse(code)
        assert '"--checkpoint_dir", folder' in code
    printed = run_examples(folder, sample / "qwen3-base")
    assert printed.keys() == {name for name in made if not NOT_RUN.get(name.partition("-")[0])}
    assert all(printed.values())


def test_a_trained_classifier_in_every_format_that_takes_it(classifier: Path, tmp_path: Path) -> None:
    """The others are refused by name, and stop nothing. The adapter moves every label, so what loses it is always wrong."""
    levels = {"gguf": (), "openvino": ("int8",), "executorch": ("8da4w",), "litert": ("int8",), "coreml": ()}
    done = exported(tmp_path, *tuned(classifier, "relabelled.jsonl"), levels=levels)
    refused = check_refusals(done, NO_ENCODERS & outputs(levels), "sequence classifier|BertForSequenceClassification")
    folder = check_delivery(done.json, outputs(levels) - refused)
    for name, (own, reference) in scores(folder, "accuracy", inputs=100).items():
        assert reference > 0.5, "half of the passages; a sixth is chance"
        assert abs(own - reference) <= 0.03, name
    if "openvino" in PRESENT:
        assert run_example(folder, "openvino")


def test_a_trained_translator_in_every_format_that_takes_it(translator: Path, tmp_path: Path) -> None:
    """The adapter exchanges the translations of a third of the words, so what loses it is wrong about most sentences."""
    levels = {"openvino": ("int8",), "gguf": (), "executorch": (), "litert": (), "coreml": ()}
    done = exported(tmp_path, *tuned(translator, "tuned.jsonl"), levels=levels)
    refused = check_refusals(done, NO_PAIRS & outputs(levels), "encoder-decoder")
    folder = check_delivery(done.json, outputs(levels) - refused)
    for name, (own, reference) in scores(folder, "chrf", inputs=SENTENCES).items():
        assert reference > 0.8
        assert abs(own - reference) <= 0.02, name
    if "openvino" in PRESENT:
        assert run_example(folder, "openvino")


def tuned(root: Path, expected: str) -> list[str | Path]:
    """Return words that name a trained base and its adapter, held-out text, and expected answers."""
    words: list[str | Path] = ["--base-model", root / "model", "--checkpoint", root / "adapter"]
    settings = {"heldout": root / "heldout", "test_input_samples": root / expected, "test_samples": 4}
    return words + [word for name, value in settings.items() for word in ("--set", f"validation.{name}={value}")]


def scores(folder: Path, name: str, *, inputs: int) -> dict[str, tuple[float, float]]:
    """Return a score of each output that was run, and the reference's."""
    found = {}
    for output in json.loads((folder / "report.json").read_text())["validation"]["outputs"]:
        if output["status"] == "not_run":
            continue
        assert output["answers"]["with_expected"] == output["answers"]["inputs"] == inputs, output["name"]
        [score] = [each for each in output["answers"]["scores"] if each["name"] == name]
        found[output["name"]] = (score["value"], score["reference"])
    return found


def check_refusals(done: Done, refused: frozenset[str], kind: str) -> frozenset[str]:
    """Check that these outputs and no others are refused for the model's kind or class, a pattern; return them."""
    assert done.code == (6 if refused else 0), done.err[-3000:]
    assert done.json["failed"].keys() == refused
    for output in done.json["failed"].values():
        assert (output["state"], output["reason"]) == ("not_run", "FAMILY_UNSUPPORTED")
        assert re.search(kind, output["error_message"])
    return refused
