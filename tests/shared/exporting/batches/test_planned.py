"""A batch before it runs: each export's plan, what makes one impossible, names that clash, and the sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import slipway
from slipway.exporting.batches.result import TABLE
from support.commands.cli import run_here
from support.models.sweeps import make_model, make_sweep
from support.servers.free_ports import free_port


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sweep")
    return make_sweep(root, "a", "b")


@pytest.fixture
def options(sweep: Path, tmp_path: Path) -> dict[str, Any]:
    where = {"out": tmp_path / "out", "home": tmp_path / "home", "base": sweep.parent / "base"}
    return {**where, "formats": "pytorch:none+int8", "settings": {"validation.enabled": False}}


def test_the_plan_of_a_list_has_each_plan_and_the_sums(sweep: Path, options: dict[str, Any]) -> None:
    made = slipway.plan([sweep / "a", sweep / "b"], **options)
    alone = slipway.plan(sweep / "a", **options)
    assert made.require() is made
    assert [each.subject.name for each in made.exports] == ["a", "b"]
    assert made.exports[0].plan is not None
    assert made.exports[0].plan.tasks == alone.tasks
    assert made.expected_seconds == pytest.approx(2 * alone.expected_seconds)
    assert made.stored_bytes == 2 * alone.checked.stored_bytes > 0
    assert made.delivered_bytes == 2 * alone.checked.delivered_bytes > 0
    assert {each.check for each in made.findings} <= {"disk: SLIPWAY_HOME", "disk: output"}
    assert repr(made).splitlines() == ["BatchPlan: 2 exports, 0 left out", "a, b", "possible"]
    assert "<td>a</td>" in made._repr_html_()
    assert len(slipway.plan([sweep / "a"], **options).exports) == 1


def test_one_that_is_impossible_is_named_and_the_others_are_not(
    sweep: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    made = slipway.plan([sweep / "a", tmp_path / "missing", sweep / "b"], **options)
    assert [each.error is None for each in made.exports] == [True, False, True]
    assert not made.possible
    with pytest.raises(slipway.ModelExportError, match=r"^checkpoint folder .*missing does not exist"):
        made.require()
    assert "impossible: missing: [CHECKPOINT_NOT_FOUND]" in repr(made)


def test_a_file_that_cannot_be_read_makes_one_impossible(sweep: Path, options: dict[str, Any]) -> None:
    """Here a name that is too long for the file system."""
    made = slipway.plan(["x" * 300, sweep / "a"], **options)
    first, second = made.exports
    assert first.error is not None
    assert first.error.reason == "FILE_ERROR"
    assert second.error is None


def test_settings_that_suit_only_some_are_told_by_name(sweep: Path, options: dict[str, Any]) -> None:
    """A plain model takes no second adapter."""
    model = make_model(options["out"].parent / "model")
    settings = {**options["settings"], "combination.adapters": [str(sweep / "b")]}
    made = slipway.plan([sweep / "a", model], **{**options, "settings": settings})
    first, second = made.exports
    assert first.error is None
    assert second.error is not None
    assert "combination.adapters" in str(second.error)


def test_settings_that_suit_none_are_one_error(sweep: Path, options: dict[str, Any]) -> None:
    with pytest.raises(slipway.ConfigurationError, match=r"optimization\.quantisation"):
        slipway.plan([sweep / "a", sweep / "b"], **{**options, "settings": {"optimization.quantisation": "int8"}})


@pytest.mark.parametrize("call", [slipway.plan, slipway.export])
def test_two_outputs_of_one_name_are_refused_before_anything_runs(
    sweep: Path, options: dict[str, Any], tmp_path: Path, call: Any
) -> None:
    other = make_sweep(tmp_path / "other", "a")
    same = [[sweep / "a", other / "a"], [sweep / "a", sweep / "a" / "checkpoint-10"], [sweep / "a", sweep / "a"]]
    for runs in same:
        with pytest.raises(slipway.ConfigurationError) as caught:
            call(runs, **options)
        assert caught.value.reason == "OUTPUT_CLASH"
        assert "a_{timestamp}" in caught.value.message
    for pattern in ("fixed", "{timestamp}"):
        settings = {**options["settings"], "output.naming_pattern": pattern}
        with pytest.raises(slipway.ConfigurationError, match="would be delivered to one folder"):
            call([sweep / "a", sweep / "b"], **{**options, "settings": settings})
    assert not options["out"].exists()
    apart = {**options["settings"], "output.naming_pattern": "{export_id}"}
    assert slipway.plan([sweep / "a", other / "a"], **{**options, "settings": apart}).possible


def test_an_output_may_not_have_the_name_of_the_table(options: dict[str, Any], tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "odd", TABLE)
    settings = {**options["settings"], "output.naming_pattern": "{model_name}"}
    with pytest.raises(slipway.ConfigurationError, match="the name of the batch's table"):
        slipway.plan([sweep / TABLE], **{**options, "settings": settings})


def test_a_file_in_the_tables_place_is_refused(sweep: Path, options: dict[str, Any]) -> None:
    options["out"].mkdir()
    (options["out"] / TABLE).write_text("mine")
    with pytest.raises(slipway.ArtifactError) as caught:
        slipway.plan([sweep / "a"], **options)
    assert caught.value.reason == "OUTPUT_EXISTS"


def test_a_file_in_the_tables_place_is_refused_where_nothing_can_run(options: dict[str, Any], tmp_path: Path) -> None:
    options["out"].mkdir()
    (options["out"] / TABLE).write_text('{"mine": 1}')
    with pytest.raises(slipway.ArtifactError) as caught:
        slipway.plan([tmp_path / "missing", tmp_path / "gone"], **options)
    assert caught.value.reason == "OUTPUT_EXISTS"


def test_a_list_keeps_a_model_that_is_the_base_of_another(sweep: Path, options: dict[str, Any]) -> None:
    made = slipway.plan([options["base"], sweep / "a"], **options)
    assert [each.subject.name for each in made.exports] == ["base", "a"]
    assert made.left_out == ()


def words(sweep: Path, options: dict[str, Any]) -> list[str]:
    where = ["--base-model", options["base"], "--out", options["out"], "-f", options["formats"]]
    return [str(word) for word in ("--each", sweep, *where, "--set", "validation.enabled=false")]


def test_the_command_plans_a_folder(
    sweep: Path,
    options: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The base itself is in the folder too, and a model that is none's base."""
    monkeypatch.setenv("SLIPWAY_HOME", str(options["home"]))
    folder = make_sweep(tmp_path / "all", "a", "b")
    base = (tmp_path / "all" / "base").rename(folder / "base")
    make_model(folder / "whole", seed=5)
    (folder / "notes.txt").touch()
    given = words(folder, {**options, "base": base})
    assert run_here("export", *given, "--plan", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in plan["exports"]] == ["a", "b", "whole"]
    assert all(each["plan"]["tasks"] for each in plan["exports"])
    assert [each["name"] for each in plan["left_out"]] == ["base", "notes.txt"]
    assert plan["left_out"][0]["why"] == "it is the base model of b"
    (folder / "broken" / "checkpoint-1").mkdir(parents=True)
    assert run_here("export", *given, "--plan") == 3
    shown = capsys.readouterr().out
    assert "impossible broken: [" in shown
    assert "left out notes.txt: it is a file" in shown
    assert "4 exports" in shown


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["RUN"], 2, "leave out RUN and --checkpoint"),
        (["--checkpoint", "RUN"], 2, "leave out RUN and --checkpoint"),
        (["--each", "nowhere"], 3, "CHECKPOINT_NOT_FOUND"),
    ],
)
def test_what_the_command_refuses(
    sweep: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str], more: list[str], code: int, said: str
) -> None:
    assert run_here("export", *words(sweep, options), *more) == code
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_run_is_no_folder_of_runs(sweep: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("export", *words(sweep / "a", options), "--json") == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["reason"], document["success"]) == ("BATCH_INVALID", False)
    assert f"slipway export {sweep / 'a'}" in document["remedy"]


def test_a_coordinator_that_is_away_is_one_failure_and_not_one_for_each(
    sweep: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(options["home"]))
    away = ("--coordinator", f"127.0.0.1:{free_port()}")
    assert run_here("export", *words(sweep, options), *away, "--json", "--progress", "none") == 7
    printed = capsys.readouterr()
    assert json.loads(printed.out)["reason"] == "COORDINATOR_UNAVAILABLE"
    assert printed.err.count("COORDINATOR_UNAVAILABLE") == 1
    assert not options["out"].exists()
