"""A base model that the adapter was not trained on: refused, or never a green proof; by the command a user types."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.commands.cli import Done, slipway

pytestmark = [pytest.mark.slow]


class Project:
    """A run of the sample with its base beside it, and another folder for other bases."""

    def __init__(self, root: Path, sample: Path) -> None:
        self.root, self.sample = root, sample
        self.base, self.elsewhere = root / "qwen3-base", root / "elsewhere"
        self.elsewhere.mkdir()
        shutil.copytree(sample / "qwen3-base", self.base)
        newest = max(
            (sample / "qwen3-finetuned").glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2])
        )
        shutil.copytree(newest, root / "qwen3-finetuned" / newest.name)

    def export(self, *more: str | Path, base: Path | None = None, command: str = "export") -> Done:
        formats = ("--set", "formats.onnx.enabled=false", "--set", "validation.benchmark_performance=false")
        where = ("--checkpoint", self.root / "qwen3-finetuned", *(("--base-model", base) if base else ()))
        out = ("--out", self.root / "out") if command == "export" else ()
        return slipway(command, "--json", *where, *out, *formats, *more, home=self.root / "home")

    @property
    def heldout(self) -> tuple[str, str]:
        return ("--set", f"validation.heldout={self.sample / 'heldout'}")


@pytest.fixture
def project(tmp_path: Path, sample: Path) -> Project:
    return Project(tmp_path, sample)


def make_other_qwen3(folder: Path, sample: Path) -> Path:
    """The same architecture with other weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(sample / "qwen3-base")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return with_tokenizer(folder, sample)


def with_tokenizer(folder: Path, sample: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(sample / "qwen3-base" / name, folder)
    return folder


def shown(done: Done) -> dict[str, str]:
    """The verdict in the result, which page, card and data of the delivered folder repeat."""
    verdict: dict[str, str] = done.json["base_match"]
    folder = Path(done.json["output_directory"])
    assert json.loads((folder / "report.json").read_text())["result"]["base_match"] == verdict
    card, page = (folder / "README.md").read_text(), (folder / "report.html").read_text()
    assert ("fine-tuned with a LoRA adapter" in card) is (verdict["verdict"] == "green")
    assert ("base_model_relation: finetune" in card) is (verdict["verdict"] == "green")
    assert ('class="verdict amber"' in page) is (verdict["verdict"] == "amber")
    return verdict


def test_another_base_is_refused_before_anything_runs_unless_it_is_trusted(project: Project) -> None:
    # In a folder of the recorded name, which is all that a comparison of names would see.
    wrong = make_other_qwen3(project.elsewhere / "qwen3-base", project.sample)
    done = project.export(base=wrong)
    assert (done.code, done.json["reason"]) == (3, "BASE_MODEL_MISMATCH"), done.err
    message = done.json["error_message"]
    needed = ("has other values", str(wrong), str(project.base), "base_model.name", "--base-model", "base_model.trust")
    assert [text for text in needed if text not in message] == []
    assert not (project.root / "out").exists()

    planned = project.export("--plan", base=wrong)
    assert planned.code == 3
    assert [entry["reason"] for entry in planned.json["preflight"]["findings"]] == ["BASE_MODEL_MISMATCH"]

    trusted = ("--set", "base_model.trust=true", "--set", "validation.enabled=false")
    done = project.export(*trusted, base=wrong)
    assert (done.code, done.json["success"]) == (0, True), done.err
    assert (shown(done)["status"], shown(done)["verdict"]) == ("trusted", "amber")
    assert any("has other values" in warning for warning in done.json["warnings"])


def test_the_right_weights_under_another_name_are_taken(project: Project) -> None:
    copy = shutil.copytree(project.base, project.elsewhere / "renamed")
    done = project.export("--set", "validation.enabled=false", base=copy)
    assert done.code == 0, done.err
    assert (shown(done)["status"], shown(done)["verdict"]) == ("confirmed", "green")
    assert [warning for warning in done.json["warnings"] if "base" in warning] == []


def test_a_base_that_cannot_be_compared_is_judged_by_measurement(project: Project) -> None:
    shutil.move(project.base, project.elsewhere / "renamed")
    done = project.export(*project.heldout, base=project.elsewhere / "renamed")
    assert done.code == 0, done.err
    assert (shown(done)["status"], shown(done)["verdict"]) == ("measured", "green")
    assert "lowers perplexity" in shown(done)["reason"]

    done = project.export("--set", "validation.enabled=false", base=project.elsewhere / "renamed")
    assert (done.code, done.json["success"]) == (0, True), done.err
    assert (shown(done)["status"], shown(done)["verdict"]) == ("unproven", "amber")
    assert "'qwen3-base'" in shown(done)["reason"]
    assert "validation.heldout" in shown(done)["reason"]


def test_another_model_in_the_recorded_folder_is_never_green(project: Project) -> None:
    shutil.rmtree(project.base)
    make_other_qwen3(project.base, project.sample)
    done = project.export(*project.heldout)
    assert (done.code, done.json["success"]) == (0, True), done.err
    assert {entry["status"] for entry in done.json["formats"].values()} == {"passed"}
    assert (shown(done)["status"], shown(done)["verdict"]) == ("unproven", "amber")
