"""What an earlier version made on this machine: listed, shown, verified, delivered again and reused; what it began is finished."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipway.advice.measured import read_measured
from slipway.artifacts.opening import open_store
from slipway.embedded.local_exports import delete_local_export, local_export
from slipway.exporting.stored_export import delivered_export
from slipway.results.stored import stored_report
from slipway.settings import Settings
from support.harness.described_reports import of_another_version
from support.models import tiny_models
from support.upgrades.real_exports import Made, export, words
from support.upgrades.site import lost
from support.upgrades.versions import THIS, Version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    tiny_models.make_base(root / "base")
    tiny_models.make_checkpoint(root / "base", root / "run")
    return root


@pytest.fixture(scope="module")
def made(previous: Version, project: Path) -> Made:
    """An export of the earlier version, with its home; tests only read it."""
    return export(previous, project, project / "out", home=project / "home")


@pytest.fixture
def home(made: Made, project: Path, tmp_path: Path) -> Path:
    """A copy of the earlier version's home."""
    return Path(shutil.copytree(project / "home", tmp_path / "home"))


def settings(home: Path) -> Settings:
    return Settings.from_environment({"SLIPWAY_HOME": str(home)})


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_is_listed_as_before(previous: Version, made: Made, home: Path) -> None:
    for arguments in (["list", "--json"], ["get", made.export, "--json"]):
        before, after = (version.run(*arguments, home=home) for version in (previous, THIS))
        assert (before.code, after.code) == (0, 0), after.err
        assert lost(before.json, after.json) == []
    shown = THIS.run("list", home=home)
    assert made.export in shown.out


def test_its_report_is_read_from_the_store_and_from_its_folder(made: Made, home: Path) -> None:
    written = json.loads((made.folder / "report.json").read_text())
    message = local_export(settings(home), made.export).message
    assert message is not None
    report = json.loads(stored_report(message, open_store(settings(home))).model_dump_json())
    places = {"paths", "output_directory", "validation_report_path", "warnings"}
    before = {name: value for name, value in written["result"].items() if name not in places}
    before["base_match"].pop("reason")  # each version words it by itself
    assert lost(before, report["result"]) == []
    assert lost(written["validation"], report["validation"]) == []
    assert {name: each.status for name, each in read_measured(made.folder).items()} == {
        name: entry["status"] for name, entry in made.result["formats"].items()
    }


def test_its_folder_is_verified(made: Made, home: Path, tmp_path: Path) -> None:
    of_another_version.add(tmp_path)
    copy = Path(shutil.copytree(made.folder, tmp_path / "delivered"))
    for path in (str(copy), *made.digests.values()):
        done = THIS.run("verify", path, "--json", home=home)
        assert done.code == 0, done.err
        assert done.json["files"] > 0
    (copy / "pytorch" / "config.json").write_text("{}")
    done = THIS.run("verify", str(copy), home=home)
    assert done.code == 7
    assert "pytorch/config.json" in done.err


def test_it_is_delivered_again_from_the_store(made: Made, home: Path) -> None:
    with delivered_export(made.export, settings(home)) as folder:
        before, after = files(made.folder), files(folder)
    assert set(before) <= set(after)
    for name, content in before.items():
        if name.startswith(("pytorch/", "pytorch-int8/")):
            assert after[name] == content, name
    old, new = (json.loads(each["lineage.json"]) for each in (before, after))
    assert lost(old["sources"], new["sources"]) == []
    assert lost(old["tasks"], new["tasks"]) == []


def test_nothing_that_it_needs_is_collected_and_it_can_be_deleted(made: Made, home: Path) -> None:
    done = THIS.run("cache", "gc", "--older-than", "30d", "--json", home=home)
    assert done.code == 0, done.err
    assert THIS.run("verify", made.digests["pytorch"], home=home).code == 0
    delete_local_export(settings(home), made.export)
    assert THIS.run("list", "--json", home=home).json["exports"] == []


def lineage(made: Made) -> dict[str, Any]:
    """Return the tasks of a delivered export by id."""
    return {task["id"]: task for task in json.loads((made.folder / "lineage.json").read_text())["tasks"]}


def test_the_same_command_reuses_what_action_keys_allow(
    previous: Version, project: Path, made: Made, home: Path, tmp_path: Path
) -> None:
    """Exactly the results of a stage of the same version, with the same libraries, parameters and inputs."""
    again = export(THIS, project, tmp_path / "out", home=home)
    before, after = lineage(made), lineage(again)
    old, new = previous.facts["stages"], THIS.facts["stages"]
    allowed = {
        name
        for name, task in after.items()
        if name in before
        and old.get(task["stage"]) == new[task["stage"]]
        and all(before[name][part] == task[part] for part in ("stage", "params", "inputs"))
    }
    assert {name for name, attempt in again.attempts.items() if attempt["reused"]} == allowed
    for name in allowed:
        assert after[name]["outputs"] == before[name]["outputs"]
    assert THIS.run("verify", str(again.folder), home=home).code == 0


def test_what_it_was_interrupted_in_is_finished(previous: Version, project: Path, tmp_path: Path) -> None:
    """Killed with all its processes behind the merge: the same command of this version has the merge, and ends."""
    home = tmp_path / "home"
    arguments = words(project, tmp_path / "out", "--progress", "json")
    process = previous.start(*arguments, home=home)
    try:
        assert process.stderr is not None
        finished, reached = set[str](), False
        for line in process.stderr:
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "task" and event.get("state") == "succeeded":
                finished.add(event["task"])
            if event.get("event") == "progress" and event.get("task", "").startswith("quantize"):
                reached = True
                break
        assert reached
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        for each in (process, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()
        psutil.wait_procs(children, timeout=60)
    assert "merge" in finished
    (listed,) = THIS.run("list", "--json", home=home).json["exports"]
    assert listed["local_state"] == "interrupted"
    assert THIS.run("cache", "gc", "--older-than", "0s", "--json", home=home).code == 0, "its artifacts are in use"
    ended = export(THIS, project, tmp_path / "out", home=home)
    if previous.facts["stages"]["merge"] == THIS.facts["stages"]["merge"]:
        assert ended.attempts["merge"]["reused"] or ended.export == export_id(listed)
    assert THIS.run("verify", str(ended.folder), home=home).code == 0
    assert list((home / "scratch").iterdir()) == []


def export_id(listed: Mapping[str, Any]) -> str:
    return str(listed["name"]).rpartition("/")[2]


def test_the_earlier_version_still_uses_the_store(
    previous: Version, project: Path, made: Made, home: Path, tmp_path: Path
) -> None:
    """After going back: all of its own results are reused, and what this version made is listed and verified."""
    again = export(THIS, project, tmp_path / "new", home=home)
    listed = previous.run("list", "--json", home=home)
    assert listed.code == 0, listed.err
    assert {export_id(each) for each in listed.json["exports"]} == {made.export, again.export}
    assert previous.run("verify", str(again.folder), home=home).code == 0
    back = export(previous, project, tmp_path / "back", home=home)
    assert all(attempt["reused"] for attempt in back.attempts.values())
    assert back.digests == made.digests
