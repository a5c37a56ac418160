"""``slipway formats``, ``workers`` and ``projects``: what can be made here and at a coordinator, who works, why tasks wait, what is used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipway.cli.remote.projects import print_projects
from slipway.formats.registry import formats
from slipway_protos.v1 import coordinator_pb2 as pb
from support.commands.cli import run_here
from support.coordinators.harness import STAGE, Harness, tiny_export, tiny_task, wait_for
from support.coordinators.joined_workers import joined


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    with Harness(tmp_path, with_worker=False, options={"workers_gone": False}) as harness:
        monkeypatch.setenv("SLIPWAY_COORDINATOR", harness.address)
        yield harness


def printed(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capfd.readouterr()
    assert run_here(*words, "--json") == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_a_coordinator_without_workers_makes_nothing_and_says_why(
    harness: Harness, capfd: pytest.CaptureFixture[str]
) -> None:
    document = printed(capfd, "formats")
    assert document["validation_obstacle"]["message"] == "no worker runs the stage reference"
    found = document["formats"]
    assert [each["name"] for each in found] == list(formats())
    assert all(each["available"] is False for each in found)
    assert all(level["available"] is False for each in found for level in each["levels"])
    assert {each["name"]: each for each in found}["adapter"]["levels"] == [], "also what is empty is there"
    assert run_here("formats") == 0
    told = capfd.readouterr()
    out = " ".join(told.out.split())
    assert "outputs cannot be judged" in told.err
    assert "no worker runs the stage merge" in out
    assert "slipway worker --stage merge" in out
    assert run_here("workers") == 0
    told = capfd.readouterr()
    assert (told.out, told.err.split("\n")[:2]) == ("", ["no workers", "nothing waits"])
    assert printed(capfd, "workers") == {"workers": [], "queue": [], "hidden_workers": 0}


def test_workers_and_the_queue_are_shown(harness: Harness, capfd: pytest.CaptureFixture[str]) -> None:
    with joined(harness, "first", stages=("merge", "gguf"), slots=2):
        harness.submit(tiny_export("x", tiny_task("a"), base=harness.base()))
        wait_for(lambda: printed(capfd, "workers")["queue"])
        assert run_here("workers") == 0
        lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
        assert lines[1].startswith("first active 0 of 2 gguf, merge 3.4 GB 3 ")
        assert f"1 {STAGE} default" in lines[-1]
        assert f"no worker runs the stage {STAGE}" in lines[-1]
        assert run_here("formats") == 0
        table = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
        (gguf,) = (line for line in table if line.startswith("gguf "))
        assert gguf.startswith("gguf yes bf16, q8_0")
        (pytorch,) = (line for line in table if line.startswith("pytorch "))
        assert pytorch.startswith("pytorch in part ")
        assert "fp16: no worker runs the stage quantize" in pytorch
        document = printed(capfd, "workers")
        assert (document["workers"][0]["running_tasks"], document["workers"][0]["tasks"]) == (0, [])
        assert document["workers"][0]["machine"]["gpu_architecture"] == ""
        assert document["workers"][0]["machine"]["processors"] == 3
        assert document["queue"][0]["reason"] == "WAIT_REASON_NO_WORKER"


def test_projects_are_shown_with_what_they_use(harness: Harness, capfd: pytest.CaptureFixture[str]) -> None:
    assert printed(capfd, "projects") == {"projects": []}
    assert run_here("projects") == 0
    assert capfd.readouterr().err.splitlines()[0] == "no projects"
    (harness.home / "text").write_text("base" * 500)
    harness.submit(tiny_export("x", tiny_task("a"), base=harness.store.put_files({"text": harness.home / "text"})))
    (project,) = wait_for(
        lambda: [
            each
            for each in printed(capfd, "projects")["projects"]
            if not each["usage"]["unmeasured_artifacts"] and each["usage"]["stored_bytes"] != "0"
        ]
    )
    assert project["name"] == "projects/default"
    assert project["limits"] == {"weight": 1, "highest_priority": 100}
    assert project["usage"]["unended_exports"] == 1
    assert int(project["usage"]["stored_bytes"]) > 2000
    assert run_here("projects") == 0
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert lines[1].startswith("default 1 2.")
    assert lines[1].endswith(" kB 0.0 1 100")


def test_limits_are_shown_beside_what_is_used(capfd: pytest.CaptureFixture[str]) -> None:
    limits = pb.ProjectLimits(
        weight=2, highest_priority=50, unended_exports=0, stored_bytes=2 * 10**12, gpu_seconds=360_000
    )
    usage = pb.ProjectUsage(unended_exports=3, stored_bytes=10**9, unmeasured_artifacts=4, gpu_seconds=45_000.5)
    print_projects([pb.Project(name="projects/red", limits=limits, usage=usage)], as_json=False)
    shown = capfd.readouterr()
    assert " ".join(shown.out.splitlines()[1].split()) == "red 3 of 0 1.0 GB of 2.0 TB 12.5 of 100.0 2 50"
    assert "being measured: 4" in shown.err


def test_without_a_coordinator_formats_are_those_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    document = printed(capfd, "formats")
    found = {each["name"]: each for each in document["formats"]}
    stages = {each["name"]: each for each in printed(capfd, "doctor")["stages"]}
    can_judge = stages["reference"]["available"] and stages["validate"]["available"]
    assert (document["validation_obstacle"] is None) == can_judge
    doctor = {each["name"]: each for each in printed(capfd, "doctor")["formats"]}
    assert list(found) == list(formats())
    for name, each in found.items():
        assert each["available"] == doctor[name]["available"], name
        for level in each["levels"]:
            assert level["available"] == doctor[f"{name}-<level>"]["available"], (name, level["name"])
    assert run_here("workers") == 2
    assert "--coordinator" in capfd.readouterr().err


def test_a_coordinator_that_is_away_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for command in ("formats", "workers"):
        assert run_here(command, "--coordinator", f"unix:{tmp_path / 'nobody'}", "--json") == 7
        assert json.loads(capfd.readouterr().out)["reason"] == "COORDINATOR_UNAVAILABLE"
