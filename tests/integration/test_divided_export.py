"""Exports of a model that is merged and rounded in parts: the files are those of an export in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts import LocalStore
from slipway.configuration import parse
from support.commands.cli import slipway
from support.coordinators.harness import Harness, state
from support.coordinators.joined_workers import joined
from support.models import tiny_models

pytestmark = pytest.mark.slow

SMALL = {"execution.shard_bytes": "1048576"}
DIVIDED = SMALL | {"execution.split_bytes": "1500000"}
PLAIN = {"validation.enabled": "false", "formats.onnx.enabled": "false", "formats.pytorch.quantization": "bf16"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of 4 MB with a checkpoint."""
    root = tmp_path_factory.mktemp("project")
    tiny_models.make_base(root / "base", hidden=256)
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


def export(project: Path, name: str, *words: str, **settings: str) -> Any:
    where = ["--base-model", project / "base", "--checkpoint", project / "run", "--out", project / f"out-{name}"]
    sets = [word for key, value in (PLAIN | settings).items() for word in ("--set", f"{key}={value}")]
    done = slipway("export", "--json", *words, *where, *sets, home=project / f"home-{name}")
    assert done.code == 0, done.err[-3000:]
    return done.json


def content(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_an_embedded_export_in_parts_delivers_the_files_of_one_in_one_piece(project: Path) -> None:
    plan = export(project, "plan", "--plan", **DIVIDED)
    tasks = [task["id"] for task in plan["tasks"]]
    assert tasks[:4] == ["merge.part-1", "merge.part-2", "merge.part-3", "merge"]
    whole, parts = export(project, "whole", **SMALL), export(project, "parts", **DIVIDED)
    assert {attempt["task"] for attempt in parts["attempts"]} == set(tasks)
    assert parts["formats"].keys() == whole["formats"].keys() == {"pytorch", "pytorch-bf16"}
    for name, path in whole["paths"].items():
        assert content(parts["paths"][name]) == content(path), name
        assert parts["formats"][name] == whole["formats"][name]
    page = (Path(parts["output_directory"]) / "report.html").read_text()
    assert "merge: 3 of 3 parts" in page
    assert "merge.part-2" not in page


def test_two_workers_at_a_coordinator_make_the_same_artifacts(project: Path, tmp_path: Path) -> None:
    settings = {
        "formats": {"pytorch": {"enabled": True, "quantization": "bf16"}, "onnx": {"enabled": False}},
        "validation": {"enabled": False},
        "checkpoint": {"path": "run"},
    }
    made = {}
    stages = ("merge", "quantize")
    with (
        Harness(tmp_path, with_worker=False) as harness,
        joined(harness, "one", stages=stages),
        joined(harness, "two", stages=stages),
    ):
        sources = {
            "base": put(harness.store, project / "base"),
            "adapter": put(harness.store, project / "run" / "checkpoint-10"),
        }
        for name, execution in (
            ("parts", {"split_bytes": 1_500_000, "shard_bytes": 1 << 20}),
            ("whole", {"shard_bytes": 1 << 20}),
        ):
            created = harness.client.create_export(
                parse({**settings, "execution": execution}), sources=sources, export_id=name
            )
            made[name] = harness.finished(created.name)
            assert state(made[name]) == "succeeded", made[name].error
    assert dict(made["parts"].outputs) == dict(made["whole"].outputs)
    workers = {task.attempts[-1].worker for task in made["parts"].tasks}
    assert len(workers) == 2
    facts = {name: next(task.facts for task in each.tasks if task.id == "merge") for name, each in made.items()}
    assert facts["parts"] == facts["whole"]
    cast = next(task for task in made["whole"].tasks if task.id == "quantize-pytorch-bf16")
    assert not cast.attempts[-1].reused, "it is another action, whose output is the same"


def put(store: LocalStore, folder: Path) -> str:
    return store.put_files({path.name: path for path in folder.iterdir() if path.is_file()})
