"""Every recipe of docs/recipes.md, planned, and for real where that is cheap or where services are started; likewise the guide's exports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway.client import Client
from slipway.errors import ModelExportError
from support.commands.cli import SLIPWAY, Done, environment, run_here, slipway
from support.coordinators.harness import wait_for
from support.models import tiny_models
from support.models.family_models import make_family_adapter, make_family_model
from support.servers.free_ports import free_port

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:7070"


def commands(text: str) -> list[list[str]]:
    """The words of each command; what stands for something of the reader's own is left out."""
    lines = re.findall(r"^ *\$ slipway (.*)$", text, re.MULTILINE)
    return [shlex.split(line.rstrip(" &")) for line in lines if "…" not in line]


def recipes() -> dict[str, list[list[str]]]:
    """The commands of each recipe by its heading."""
    parts = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split("\n## ")[1:]
    return {part.partition("\n")[0]: commands(part) for part in parts}


RECIPES = recipes()
GUIDE = [ROOT / "README.md", ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
OF_THE_GUIDE = [
    (page.name, words)
    for page in GUIDE
    for words in commands(page.read_text(encoding="utf-8"))
    if words[0] == "export"
    and ADDRESS not in words
    and not any("demo-real" in word or "Qwen/" in word for word in words)
]
PLANNED = [words for commands in RECIPES.values() for words in commands if words[0] == "export"]
WITHOUT_SERVICES = [words for words in PLANNED if ADDRESS not in words]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the recipes name: a run with its base, its configuration, and text of both kinds."""
    folder = tmp_path_factory.mktemp("project")
    tiny_models.make_base(folder / "base")
    checkpoint = tiny_models.make_checkpoint(folder / "base", folder / "qwen3-finetuned", step=5)
    for rank in ("rank-8", "rank-16"):
        shutil.copytree(checkpoint, folder / "sweep" / rank)
    make_family_model("bert-classes", folder / "bert-base")
    make_family_adapter("bert-classes", folder / "bert-base", folder / "bert-finetuned" / "checkpoint-5")
    (folder / "texts").mkdir()
    (folder / "texts" / "one.txt").write_text("text that the training has not seen")
    said = {"messages": [{"role": "user", "content": "a question that the training has not seen"}]}
    (folder / "eval.jsonl").write_text(json.dumps(said))
    (folder / "train.jsonl").write_text('{"text": "text that the training has seen"}')
    (folder / "questions.jsonl").write_text('{"prompt": "one", "expected": "two"}\n')
    (folder / "export.yaml").write_text(
        "export: {checkpoint: {path: qwen3-finetuned}, base_model: {name: base}, output: {directory: out}}"
    )
    (checkpoint / "trainer_state.json").write_text(
        json.dumps({"global_step": 5, "best_model_checkpoint": "checkpoint-5", "best_metric": 1.5, "log_history": []})
    )
    return folder


def test_there_is_a_recipe_for_each_common_wish() -> None:
    wishes = ("Only ONNX", "A group size", "Held-out text", "Another recovery", "A remote coordinator")
    assert set(wishes) <= RECIPES.keys()
    assert all(RECIPES[wish] for wish in wishes)
    assert len(WITHOUT_SERVICES) >= 12
    assert "docs/recipes.md" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "words"), OF_THE_GUIDE, ids=lambda given: given if isinstance(given, str) else " ".join(given)
)
def test_every_export_of_the_guide_can_be_planned(
    page: str,
    words: list[str],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    code = run_here(*[word for word in words if word != "--plan"], "--plan", "--json")
    assert code == 0, f"{page}: {capfd.readouterr().err}"


@pytest.mark.parametrize("words", WITHOUT_SERVICES, ids=" ".join)
def test_every_recipe_can_be_planned(
    words: list[str], project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    code = run_here(*words, "--plan", "--json")
    assert code == 0, capfd.readouterr().err


def test_the_advice_is_given(project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(project)
    advice, *_ = RECIPES["Which format for which target"]
    assert run_here(*advice) == 0
    assert "gguf" in capfd.readouterr().out


@pytest.mark.slow
def test_stages_alone_run_as_the_recipe_says(project: Path, tmp_path: Path) -> None:
    for words in RECIPES["One stage alone"]:
        done = command(words, project, tmp_path)
        assert done.code == 0, done.err
    small, direct = (project / name / "model" / "model.safetensors" for name in ("small", "direct"))
    assert direct.read_bytes() == small.read_bytes()


@pytest.mark.slow
def test_two_lines_start_a_cluster_that_exports(project: Path, tmp_path: Path) -> None:
    """By the documented lines; SIGTERM drains both, which end with 0."""
    here = f"127.0.0.1:{free_port()}"
    coordinator, worker, export = RECIPES["A cluster on one machine"]
    quick = ("--set", "formats.onnx.enabled=false", "--set", "validation.enabled=false", "--json")
    moved = [word.replace(ADDRESS, here) for word in export]
    with service([*coordinator, "--listen", here], project, tmp_path) as first:
        wait_for(lambda: answers(here))
        with service([word.replace(ADDRESS, here) for word in worker], project, tmp_path) as second:
            done = command([*moved, *quick], project, tmp_path)
            assert done.code == 0, done.err + (tmp_path / "worker.log").read_text()
            assert done.json["success"]
            assert Path(done.json["paths"]["pytorch"], "config.json").is_file()
            for words in RECIPES["A remote coordinator"][1:]:
                more = quick if words[0] == "submit" else ("--json",)
                remote = command([*(word.replace(ADDRESS, here) for word in words), *more], project, tmp_path)
                assert remote.code == 0, remote.err
    assert (first.returncode, second.returncode) == (0, 0)


def answers(address: str) -> bool:
    with Client(address) as client:
        try:
            return list(client.list_artifacts()) == []
        except ModelExportError:
            return False


def command(words: list[str], project: Path, home: Path) -> Done:
    before = Path.cwd()
    os.chdir(project)
    try:
        return slipway(*words, home=home)
    finally:
        os.chdir(before)


@contextlib.contextmanager
def service(words: list[str], project: Path, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (home / f"{words[0]}.log").open("wb") as log:
        started = subprocess.Popen([SLIPWAY, *words], cwd=project, env=environment(home), stdout=log, stderr=log)
        try:
            yield started
        finally:
            started.send_signal(signal.SIGTERM)
            try:
                started.wait(60)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
