"""All formats in one export: each passes in its own runtime, one table compares them, and each example of the card runs."""

from __future__ import annotations

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
from support.commands.cli import slipway
from support.commands.usage_examples import usage_examples
from support.models.judged_families import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

LIBRARIES = {
    "gguf": "xllamacpp", "openvino": "openvino", "executorch": "executorch", "litert": "litert_torch", "adapter": "peft", "onnx": "onnxruntime",
    "torchscript": "torch", "torch_export": "torch", "pytorch": "torch",
}  # fmt: skip
"""The library without which a format is left out."""
PRESENT = tuple(name for name, library in LIBRARIES.items() if importlib.util.find_spec(library))
LEVELS = {"gguf": ("q8_0", "q4_k_m"), "openvino": ("int8", "int4"), "executorch": ("8da4w",), "litert": ("int8",)}
LIMITS = {"none": 1e-4, "q8_0": 1e-3, "int8": 1e-3, "q4_k_m": 2e-2, "int4": 2e-2, "8da4w": 2e-2}
"""Largest mean KL from base + adapter, by level."""
BESIDE = tuple(name for name in ("onnx", "gguf") if name in PRESENT)
"""Formats beside whose output of the base the adapter is delivered too."""
NO_ENCODERS = ("gguf", "adapter-gguf")
ONLY_GGUF = {f"formats.{name}.enabled": str(name == "gguf").lower() for name in LIBRARIES} | {
    "validation.enabled": "false"
}
COLUMNS = ("Validation", "Size", "Mean KL", "Load, at most", "Prompt", "Memory")


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_format_is_left_out_below_only_without_its_library(name: str) -> None:
    if name not in PRESENT:
        pytest.skip(f"{name} is not tested: {LIBRARIES[name]} is not installed")
    assert name in formats()


def exported(root: Path, *words: str | Path, levels: dict[str, tuple[str, ...]], **more: str) -> Any:
    settings = {"formats.tensorrt.enabled": "false", "optimization.quantization": "none"}
    settings |= {f"formats.{name}.enabled": str(name in PRESENT).lower() for name in LIBRARIES}
    settings |= {f"formats.{name}.quantization": ",".join(levels[name]) for name in levels if name in PRESENT}
    settings |= {f"formats.{name}.quantization": "none" for name in ("pytorch", "onnx")}
    if "adapter" in PRESENT:
        settings["formats.adapter.targets"] = ",".join(("peft", *BESIDE))
    flags = [word for key, value in (settings | more).items() for word in ("--set", f"{key}={value}")]
    return slipway("export", "--json", *words, "--out", root / "out", *flags, home=root / "home", timeout=2400)


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
    printed = {}
    for name, code in usage_examples((folder / "README.md").read_text()).items():
        done = subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
        printed[name] = done.stdout.strip()
    return printed


def check_delivery(result: dict[str, Any], made: set[str]) -> Path:
    """Check verdicts, the table, the card and the lineage; return the output directory."""
    folder = Path(result["output_directory"])
    assert {name: each["status"] for name, each in result["formats"].items()} == dict.fromkeys(made, "passed")
    validation = json.loads((folder / "report.json").read_text())["validation"]
    for output in validation["outputs"]:
        assert output["to_reference"]["mean_kl"] < LIMITS.get(output["level"], LIMITS["none"]), output["name"]
        assert output["load_seconds"] > 0
        if output["texts"]:
            assert output["texts"]["texts"] > 40
            assert output["texts"]["different"] == output["texts"]["rendered_otherwise"] == 0
    shown = table(folder / "report.html")
    assert shown.keys() >= made
    missing = [(name, column) for name in made for column in COLUMNS if shown[name].get(column, "–") == "–"]
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
        base = ("--base-model", sample / "qwen3-base", "--set", "checkpoint.path=none")
        of_base = exported(tmp_path / "plain", *base, levels={}, **ONLY_GGUF)
        assert of_base.code == 0, of_base.err[-3000:]
        [file] = Path(of_base.json["paths"]["gguf"]).glob("*.gguf")
        shutil.copy(file, folder / "adapter-gguf" / "base.gguf")
    printed = run_examples(folder, sample / "qwen3-base")
    assert printed.keys() == made
    assert all(printed.values())


def test_a_classifier_in_every_format_that_takes_it(tmp_path: Path) -> None:
    """The others are refused by name, and stop nothing."""
    model = make("bert-classes", tmp_path / "bert")
    assert model.adapter is not None
    levels = {"gguf": (), "openvino": ("int8",), "executorch": ("8da4w",), "litert": ("int8",)}
    # Random weights suffer more than trained ones from 4 and 8 bits.
    limits = "int8.top1_agreement=0.95,int8.adapter_strength_error=0.06"
    words = ("--base-model", model.base, "--checkpoint", model.adapter)
    done = exported(tmp_path, *words, levels=levels, **{"validation.test_samples": "4", "validation.limits": limits})
    result, made = done.json, outputs(levels) - set(NO_ENCODERS)
    assert done.code == (6 if "gguf" in PRESENT else 0), done.err[-3000:]
    check_delivery(result, made)
    assert result["failed"].keys() == outputs(levels) & set(NO_ENCODERS)
    for refused in result["failed"].values():
        assert (refused["state"], refused["reason"]) == ("not_run", "FAMILY_UNSUPPORTED")
        assert "sequence classifier" in refused["error_message"]
