"""An export without a checkpoint: a model as it is, through the same chain, by the command a user types."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from support.commands.cli import Done, run_here, slipway
from support.models.family_models import given_by, make_family_model
from support.models.merge_models import make_family

QUICK = ("--set", "validation.enabled=false", "--set", "formats.onnx.enabled=false")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_family_model("gpt2", root / "tiny-gpt2", dtype=torch.bfloat16)
    return root


def export(models: Path, name: str, *more: str | Path, out: Path) -> Done:
    where = ("--base-model", models / name, "--out", out)
    return slipway("export", "--json", *where, *more, home=models / "home")


@pytest.mark.slow
def test_a_plain_model_goes_through_the_chain(models: Path, tmp_path: Path) -> None:
    done = export(models, "tiny-gpt2", *QUICK, "--set", "optimization.quantization=int8", out=tmp_path)
    assert done.code == 0, done.err
    assert done.json["plain"] is True
    assert done.json["base_match"] is None
    assert list(done.json["formats"]) == ["pytorch", "pytorch-int8"]
    assert [attempt["stage"] for attempt in done.json["attempts"]] == ["prepare", "quantize"]
    folder = Path(done.json["output_directory"])
    assert folder.name.startswith("tiny-gpt2_")
    before, after = (load_file(each / "model.safetensors") for each in (models / "tiny-gpt2", folder / "pytorch"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    names = {path.name for path in (folder / "pytorch").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    packed = transformers.GPT2LMHeadModel.from_pretrained(folder / "pytorch-int8")
    exact = transformers.GPT2LMHeadModel.from_pretrained(folder / "pytorch")
    assert (given_by(packed.float(), "gpt2") - given_by(exact.float(), "gpt2")).abs().max() < 0.1
    card = (folder / "README.md").read_text()
    assert "tiny-gpt2, exported as it is in the formats below" in card
    assert "LoRA" not in card
    assert "lora" not in card
    report = (folder / "report.html").read_text()
    assert "there is no adapter, so checks of one do not apply" in report
    lineage = json.loads((folder / "lineage.json").read_text())
    assert list(lineage["sources"]) == ["base"]


@pytest.mark.slow
def test_what_a_training_left_beside_a_full_fine_tune_stays_there(models: Path, tmp_path: Path) -> None:
    run = tmp_path / "my-run" / "checkpoint-30"
    shutil.copytree(models / "tiny-gpt2", run)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"):
        (run / name).write_bytes(b"left over")
    done = slipway(
        *("export", "--base-model", run, "--checkpoint", "none", "--out", tmp_path / "out", *QUICK),
        home=models / "home",
    )
    assert done.code == 0, done.err
    assert "exported as it is: there is no adapter" in done.out
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name.startswith("my-run_")
    assert {path.name for path in (folder / "pytorch").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }


def test_the_plan_says_that_there_is_no_adapter(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    where = ("--base-model", str(models / "tiny-gpt2"), "--out", str(tmp_path))
    assert run_here("export", "--plan", "--json", *where) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["sources"]["checkpoint"] is None
    assert plan["base_match"] is None
    tasks = {task["id"]: task for task in plan["tasks"]}
    assert list(tasks) == ["prepare", "onnx_export", "reference", "validate"]
    assert tasks["prepare"]["format"] == "pytorch"
    assert tasks["validate"]["inputs"] == {
        "base": "source:base", "reference": "task:reference/reference", "pytorch": "task:prepare/base", "onnx": "task:onnx_export/onnx",
    }  # fmt: skip
    said = [finding["message"] for finding in plan["preflight"]["findings"] if finding["check"] == "base model"]
    assert said == ["no checkpoint is set: it is exported as it is"]


def test_the_plan_says_which_formats_are_not_made_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    make_family("t5 without a head").save_pretrained(tmp_path / "base")
    assert run_here("export", "--plan", "--json", "--base-model", str(tmp_path / "base"), "--out", str(tmp_path)) == 0
    findings = json.loads(capsys.readouterr().out)["preflight"]["findings"]
    (found,) = [finding for finding in findings if "not run" in finding["message"]]
    assert (found["check"], found["verdict"], found["reason"]) == (
        "stage: onnx_export",
        "warning",
        "FAMILY_UNSUPPORTED",
    )
    assert "T5Model" in found["message"]
