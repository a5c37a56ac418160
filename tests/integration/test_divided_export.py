"""Exports of a model that is merged and rounded in parts: the files are those of an export in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts import LocalStore
from slipway.configuration import parse
from support.commands.cli import slipway
from support.commands.divided_exports import PARTS, SHARDS, attempts, delivered, make_project, printed, words
from support.coordinators.harness import Harness, state
from support.coordinators.joined_workers import joined

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def whole(project: Path) -> Any:
    """What an export in one piece printed."""
    return export(project, "whole", **SHARDS)


def export(project: Path, name: str, *more: str, **settings: str) -> Any:
    return printed(slipway(*words(project, name, *more, **settings), home=project / f"home-{name}"))


def test_an_embedded_export_in_parts_delivers_the_files_of_one_in_one_piece(project: Path, whole: Any) -> None:
    plan = export(project, "plan", "--plan", **PARTS)
    tasks = [task["id"] for task in plan["tasks"]]
    assert tasks[:4] == ["merge.part-1", "merge.part-2", "merge.part-3", "merge"]
    parts = export(project, "parts", **PARTS)
    assert attempts(parts) == dict.fromkeys(tasks, 1)
    assert parts["formats"].keys() == {"pytorch", "pytorch-bf16"}
    assert parts["formats"] == whole["formats"]
    assert delivered(parts) == delivered(whole)
    page = (Path(parts["output_directory"]) / "report.html").read_text()
    assert "merge: 3 of 3 parts" in page
    assert "merge.part-2" not in page


def test_two_workers_at_a_coordinator_make_the_same_artifacts(project: Path, whole: Any, tmp_path: Path) -> None:
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
    assert dict(made["parts"].outputs) == {name: each["digest"] for name, each in whole["formats"].items()}
    workers = {task.attempts[-1].worker for task in made["parts"].tasks}
    assert len(workers) == 2
    facts = {name: next(task.facts for task in each.tasks if task.id == "merge") for name, each in made.items()}
    assert facts["parts"] == facts["whole"]
    cast = next(task for task in made["whole"].tasks if task.id == "quantize-pytorch-bf16")
    assert not cast.attempts[-1].reused, "it is another action, whose output is the same"


def put(store: LocalStore, folder: Path) -> str:
    return store.put_files({path.name: path for path in folder.iterdir() if path.is_file()})
