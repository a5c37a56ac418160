"""The trained sample through every stage, by the command a user types; then the promises about what comes out."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.commands.cli import Done, slipway
from support.harness.made_once import made_once

pytestmark = pytest.mark.timeout(1800)

FORMATS = {"pytorch", "pytorch-int4", "onnx", "onnx-int8", "onnx-int4", "tensorrt"}
WEIGHTS = {"pytorch": "model.safetensors", "pytorch-int4": "model.safetensors", "tensorrt": "model.sm89.engine"}


@pytest.fixture(scope="module")
def shared(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which one export, and the same export again, were made for all tests; they only read it."""
    with made_once(tmp_path_factory, "whole-chain") as shared:
        for name in ("first.json", "again.json"):
            if not (shared / name).exists():
                command = ("export", "-c", sample / "export.yaml", "--out", shared / "exported", "--json")
                done = slipway(*command, "--progress", "json", home=shared / "home", timeout=1500)
                (shared / name).write_text(json.dumps(asdict(done)))
    return shared


@pytest.fixture(scope="module")
def home(shared: Path) -> Path:
    return shared / "home"


@pytest.fixture(scope="module")
def result(shared: Path) -> dict[str, Any]:
    done = finished(shared / "first.json")
    assert done.code == 0, done.err[-3000:]
    return done.json


@pytest.fixture(scope="module")
def folder(result: dict[str, Any]) -> Path:
    return Path(result["output_directory"])


def finished(path: Path) -> Done:
    return Done(**json.loads(path.read_text()))


def test_every_format_asked_for_is_delivered_complete(result: dict[str, Any], folder: Path) -> None:
    assert result["success"]
    assert set(result["paths"]) == FORMATS
    for name in FORMATS:
        path = folder / name
        assert Path(result["paths"][name]) == path
        names = {file.name for file in path.iterdir()}
        assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names, name
        assert WEIGHTS.get(name, "model.onnx") in names


def test_training_leftovers_never_travel(folder: Path) -> None:
    leftovers = ("optimizer", "scheduler", "rng_state", "trainer_state", "training_args", "adapter")
    assert [file for file in folder.rglob("*") if file.is_file() and file.name.startswith(leftovers)] == []


def test_checksums_are_those_of_the_files(folder: Path) -> None:
    lines = (folder / "MANIFEST.sha256").read_text().splitlines()
    listed = {line[66:]: line[:64] for line in lines}
    present = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()} - {
        "MANIFEST.sha256"
    }
    assert set(listed) == present
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    checked = subprocess.run(["sha256sum", "-c", "--quiet", "MANIFEST.sha256"], cwd=folder, capture_output=True)
    assert checked.returncode == 0


def test_the_merge_is_the_training_framework_s(sample: Path, folder: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = max((sample / "qwen3-finetuned").glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    base = AutoModelForCausalLM.from_pretrained(sample / "qwen3-base", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, checkpoint).merge_and_unload().eval()
    ours = AutoModelForCausalLM.from_pretrained(folder / "pytorch", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "pytorch")
    ids = tokenizer((sample / "heldout" / "heldout.txt").read_text()[:2000], return_tensors="pt").input_ids[:, :256]
    with torch.inference_mode():
        difference = (theirs(ids).logits - ours(ids).logits).abs().max().item()
    assert difference < 1e-5


@pytest.mark.parametrize(
    ("batch", "past", "sequence", "padding"), [(3, 0, 1, 0), (3, 0, 7, 2), (1, 5, 1, 0), (2, 4, 6, 1)]
)
def test_the_onnx_model_is_pytorch_s_at_shapes_it_was_not_traced_with(
    folder: Path, batch: int, past: int, sequence: int, padding: int
) -> None:
    import onnxruntime
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "pytorch", dtype=torch.float32).eval()
    config = model.config
    ids = torch.randint(3, config.vocab_size, (batch, past + sequence), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, past:]
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    outputs = [value.name for value in session.get_outputs()]
    cache = {
        name: np.zeros((batch, config.num_key_value_heads, 0, config.head_dim), np.float32)
        for name in names
        if "past" in name
    }
    logits = None
    for begin, end in ((0, past), (past, past + sequence)):
        if begin == end:
            continue
        feed = {
            "input_ids": ids[:, begin:end].numpy(),
            "attention_mask": mask[:, :end].numpy(),
            "position_ids": positions[:, begin:end].numpy(),
        }
        values = session.run(outputs, {name: value for name, value in {**feed, **cache}.items() if name in names})
        logits = values[0]
        cache = {
            name.replace("present", "past_key_values"): value
            for name, value in zip(outputs[1:], values[1:], strict=True)
        }
    rows = mask[:, past:].numpy().astype(bool)
    assert np.abs(logits - expected.numpy())[rows].max() < 1e-4


def test_quantized_models_stay_close_to_the_merged_one(folder: Path) -> None:
    report = json.loads((folder / "report.json").read_text())
    outputs = {output["name"]: output for output in report["validation"]["outputs"]}
    for name, kl, top1 in (("onnx-int8", 1e-3, 0.98), ("onnx-int4", 2e-2, 0.90), ("pytorch-int4", 2e-2, 0.90)):
        merged = outputs[name]["to_merged"]
        assert merged["mean_kl"] < kl, name
        assert merged["top1_agreement"] > top1, name


def test_quantized_models_are_smaller(result: dict[str, Any]) -> None:
    size = {name: value["size_bytes"] for name, value in result["formats"].items()}
    assert size["onnx-int8"] < 0.45 * size["onnx"]
    assert size["onnx-int4"] < 0.30 * size["onnx"]
    assert size["pytorch-int4"] < 0.60 * size["pytorch"]


def test_an_engine_that_cannot_run_here_is_not_called_passed(result: dict[str, Any]) -> None:
    assert result["formats"]["tensorrt"]["status"] == "not_run"
    assert {result["formats"][name]["status"] for name in FORMATS - {"tensorrt"}} == {"passed"}


@pytest.fixture(scope="module")
def examples(folder: Path) -> dict[str, str]:
    from support.commands.usage_examples import usage_examples

    card = (folder / "README.md").read_text()
    assert card.count("```python") == 3  # one for all levels of a format
    return usage_examples(card)


def run_example(example: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", example], cwd=folder, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize("name", ["onnx", pytest.param("pytorch-int4", marks=pytest.mark.slow)])
def test_the_model_card_s_examples_run(folder: Path, examples: dict[str, str], name: str) -> None:
    assert set(examples) == FORMATS
    assert "apply_chat_template" in examples[name]
    run = run_example(examples[name], folder)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


@pytest.mark.slow
def test_the_example_of_an_engine_says_what_is_missing(folder: Path, examples: dict[str, str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    run = run_example(examples["tensorrt"], folder)
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1, run.stderr


def test_the_same_command_again_reuses_everything(shared: Path, result: dict[str, Any]) -> None:
    again = finished(shared / "again.json")
    assert again.code == 0, again.err
    assert '"event": "task"' in again.err
    assert '"state": "running"' not in again.err  # no task was carried out
    assert again.json["output_directory"] == result["output_directory"]
    assert {name: value["digest"] for name, value in again.json["formats"].items()} == {
        name: value["digest"] for name, value in result["formats"].items()
    }


def test_another_export_shares_what_is_the_same(
    sample: Path, home: Path, tmp_path: Path, result: dict[str, Any]
) -> None:
    settings = ("--set", "formats.tensorrt.enabled=false", "--set", "validation.enabled=false")
    other = slipway("export", "-c", sample / "export.yaml", "--out", tmp_path, "--json", *settings, home=home)
    assert other.code == 0, other.err
    assert other.json["attempts"]
    # The text of a calibration is compared with the held-out text only where there is a validation.
    by_text = [each for each in other.json["attempts"] if "calib" in each["task"] or each["task"].endswith("int4")]
    assert all(each["reused"] for each in other.json["attempts"] if each not in by_text)


def test_verify_finds_a_changed_file(sample: Path, home: Path, tmp_path: Path, folder: Path) -> None:
    assert slipway("verify", folder, home=home).code == 0
    copy = shutil.copytree(folder, tmp_path / "copy")
    target = copy / "pytorch" / "model.safetensors"
    target.chmod(0o644)
    data = bytearray(target.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)
    found = slipway("verify", copy, home=home)
    assert found.code == 7 or found.code == 3
    assert "pytorch/model.safetensors" in found.err + found.out
