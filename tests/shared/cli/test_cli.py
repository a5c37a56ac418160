"""The command line without an export: help, exit codes, JSON, and the commands that need no coordinator."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway.cli.terminal.columns import Column, FittedTable, Prose
from slipway.cli.terminal.console import show, unbroken
from slipway.observability.logs import PlainFormatter
from support.commands.cli import SLIPWAY, Done, environment, run_here, slipway
from support.coordinators.harness import Harness

COMMANDS = (
    *("export", "submit", "get", "list", "watch", "cancel", "retry", "delete"),
    *("doctor", "checkpoints", "stage", "sample", "verify", "push", "pull", "cache"),
    *("coordinator", "worker", "token"),
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def in_process(capfd: pytest.CaptureFixture[str], *words: str | Path, home: Path, **more: str) -> Done:
    """The command in this process, with what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SLIPWAY_HOME": str(home), **more}.items():
            patch.setenv(name, value)
        code = run_here(*words)
    out, err = capfd.readouterr()
    return Done(code, out, err)


def test_help_is_quick_and_names_every_command(home: Path) -> None:
    took = []
    for _ in range(3):
        begin = cpu_seconds()
        done = slipway("--help", home=home)
        took.append(cpu_seconds() - begin)
    assert done.code == 0
    assert [name for name in COMMANDS if f" {name} " not in done.out] == []
    # 0.25 s, whatever else the machine does meanwhile; the limit leaves room for a slow one.
    assert min(took) < 1.0


def cpu_seconds() -> float:
    """What all processes have used that this one has started and seen end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("command", ["", *COMMANDS, "cache ls", "cache gc"])
def test_every_command_explains_itself_with_an_example(
    capfd: pytest.CaptureFixture[str], home: Path, command: str
) -> None:
    done = in_process(capfd, *command.split(), "--help", home=home)
    assert done.code == 0
    _, _, examples = done.out.partition("Examples")
    assert f"$ {f'slipway {command}'.strip()}" in examples


def test_help_imports_nothing_heavy(home: Path) -> None:
    script = """
import contextlib, io, sys
from slipway.cli import main
sys.argv = ["slipway", "--help"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
assert "typer.rich_utils" in sys.modules
print(sorted({"torch", "grpc", "pydantic", "transformers", "dbos"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(home),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_version(capfd: pytest.CaptureFixture[str], home: Path) -> None:
    assert in_process(capfd, "--version", home=home).out.startswith("slipway 0.")


def test_completion_scripts_are_offered(home: Path) -> None:
    in_a_shell = f"{SLIPWAY} --show-completion; exit $?"  # the shell is found among the processes above
    done = subprocess.run(["bash", "-c", in_a_shell], env=environment(home), capture_output=True, text=True)
    assert (done.returncode, "_SLIPWAY_COMPLETE=complete_bash" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonesuch"], "No such command 'nonesuch'"),
        (["export", "--nonesuch"], "No such option: --nonesuch"),
        (["stage"], "Missing argument"),
        (["watch", "e-1"], "SLIPWAY_COORDINATOR"),
        (["sample", "x", "--progress", "loud"], "plain"),
        (["cache", "gc", "x"], "unexpected extra argument"),
    ],
)
def test_usage_errors_exit_with_2_and_say_so_in_json(
    capfd: pytest.CaptureFixture[str], home: Path, words: list[str], said: str
) -> None:
    done = in_process(capfd, *words, "--json", home=home)
    assert done.code == 2
    assert done.json["reason"] == "USAGE"
    assert said in done.json["error_message"]
    assert "Usage" in done.err


def test_an_answer_in_json_is_asked_for_by_an_option_and_not_by_the_value_of_one(
    capfd: pytest.CaptureFixture[str], home: Path
) -> None:
    assert in_process(capfd, "--json", home=home).json["reason"] == "USAGE"
    assert in_process(capfd, "cache", "--json", home=home).json["reason"] == "USAGE"
    named = in_process(capfd, "verify", "sha256:0", "--project", "--json", home=home)
    assert (named.code, named.out) == (3, "")
    after = in_process(capfd, "verify", "--", "--json", home=home)
    assert (after.code, after.out) == (3, "")
    lines = in_process(capfd, "stage", "merge", "--out", "x", "--nonesuch", "--progress=json", "--json", home=home)
    assert lines.json["reason"] == "USAGE"


def test_errors_are_one_json_document_and_a_message(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    config = tmp_path / "export.yaml"
    config.write_text("export: {checkpoint: {path: run}, log: {level: loud}, outptu: {}}")
    done = in_process(capfd, "export", "-c", config, "--json", home=home, EXPORT_THREADS="x")
    assert done.code == 3
    assert done.json["reason"] == "CONFIGURATION_INVALID"
    assert {problem["key"] for problem in done.json["problems"]} == {"log.level", "outptu", "resources.threads"}
    assert "did you mean 'output'?" in done.err
    plain = in_process(capfd, "export", "-c", config, home=home)
    assert (plain.code, plain.out) == (3, "")
    assert "CONFIGURATION_INVALID" in plain.err


def test_an_unforeseen_error_is_logged_and_not_shown(
    capfd: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No input makes doctor fail on purpose, so one of its parts is broken here.
    monkeypatch.setattr("slipway.machine.doctor.stage_names", lambda: 1 / 0)
    done = in_process(capfd, "doctor", "--json", home=home)
    assert (done.code, done.json["reason"]) == (1, "INTERNAL")
    assert "Traceback" not in done.err
    (log,) = (home / "logs").iterdir()
    assert int(done.json["about"]["machine_memory_available_bytes"]) > 0
    assert "machine_home_free_bytes: " in log.read_text()
    assert log.name in done.err.replace("\n", "")
    assert "ZeroDivisionError" in log.read_text()
    assert "Traceback" in in_process(capfd, "doctor", "--debug", home=home).err


def test_no_color_is_honoured(home: Path) -> None:
    done = slipway("checkpoints", home / "absent", home=home, NO_COLOR="1", FORCE_COLOR="1")
    assert "\x1b[3" not in done.err


def test_plan_shows_settings_graph_and_preflight_and_changes_nothing(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path, run: Path
) -> None:
    settings = ("--set", "formats.onnx.enabled=false", "--set", "optimization.quantization=int8,int4")
    where = ("--checkpoint", run, "--base-model", run.parent / "base", "--out", tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    done = in_process(capfd, "export", *where, *settings, "--plan", "--json", home=home)
    assert done.code == 0, done.err
    plan = done.json
    assert plan["origins"]["formats.onnx.enabled"] == "--set formats.onnx.enabled"
    stages = [task["id"] for task in plan["tasks"]]
    assert stages == ["merge", "quantize-pytorch-int8", "quantize-pytorch-int4", "validate"]
    checks = {finding["check"]: finding for finding in plan["preflight"]["findings"]}
    assert {"disk: SLIPWAY_HOME", "memory", "stage: merge", "stage: quantize", "stage: validate"} <= set(checks)
    assert "needed" in checks["disk: SLIPWAY_HOME"]["message"]
    assert plan["preflight"]["task_bytes"]["merge"] > 8 * 16 * 4  # the weights, and what lies beside them
    text = in_process(capfd, "export", *where, *settings, "--plan", home=home).out
    assert "quantize-pytorch-int4" in text
    assert "--set optimization.quantization" in text
    assert str(run / "checkpoint-10") in text  # what was chosen, not only what was asked for
    assert sorted(tmp_path.rglob("*")) == before


def test_plan_shows_settings_of_every_kind(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path, run: Path
) -> None:
    where = ("--checkpoint", run, "--base-model", run.parent / "base", "--out", tmp_path / "out")
    settings = ("combination.weights=0.5,0.5", f"combination.adapters={run}", "validation.limits.int4.mean_kl=0.03")
    words = [word for setting in settings for word in ("--set", setting)]
    shown = in_process(capfd, "export", *where, *words, "--plan", home=home)
    assert shown.code == 0, shown.err
    assert "0.5, 0.5" in shown.out
    assert "int4: mean_kl: 0.03" in shown.out


def test_plan_names_what_rules_the_export_out(capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path) -> None:
    done = in_process(capfd, "export", "--checkpoint", tmp_path / "absent", "--plan", "--json", home=home)
    assert done.code == 3
    (finding,) = done.json["preflight"]["findings"]
    assert (finding["verdict"], finding["reason"]) == ("error", "CHECKPOINT_NOT_FOUND")
    assert done.json["tasks"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A base model and a training run with a whole and a half-written checkpoint; small, but files of the real kind."""
    import numpy as np
    from safetensors.numpy import save_file

    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"model.embed_tokens.weight": np.zeros((8, 16), np.float32)}, base / "model.safetensors")
    for step in (5, 10):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(base)}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": [{"loss": 1.5}]}))
        save_file({"lora": np.zeros((4, 16), np.float32)}, folder / "adapter_model.safetensors")
    newest = tmp_path / "run" / "checkpoint-10" / "adapter_model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    return tmp_path / "run"


def test_checkpoints_are_listed_with_their_health(capfd: pytest.CaptureFixture[str], home: Path, run: Path) -> None:
    found = in_process(capfd, "checkpoints", run, "--json", home=home).json
    assert found["latest"] == str(run / "checkpoint-5")
    assert [(entry["step"], entry["healthy"]) for entry in found["checkpoints"]] == [(10, False), (5, True)]
    text = in_process(capfd, "checkpoints", run, home=home).out
    assert "SAFETENSORS_CORRUPT" in text
    assert "1.5000" in text


def test_doctor_says_what_runs_here_and_what_is_missing(capfd: pytest.CaptureFixture[str], home: Path) -> None:
    done = in_process(capfd, "doctor", "--json", home=home)
    assert done.code == 0
    stages = {stage["name"]: stage for stage in done.json["stages"]}
    assert {"merge", "quantize", "onnx_export", "tensorrt_build", "validate"} <= set(stages)
    assert all(
        provider["version"] for stage in stages.values() for provider in stage["providers"] if provider["available"]
    )
    missing = [p for stage in stages.values() for p in stage["providers"] if not p["available"]]
    assert all("pip install" in provider["detail"] for provider in missing)
    assert {entry["name"] for entry in done.json["formats"]} >= {"pytorch", "onnx", "tensorrt"}
    assert done.json["machine"]["memory_bytes"] > 1 << 30
    assert "tensorrt_build" in in_process(capfd, "doctor", home=home).out


def test_artifacts_go_in_and_out_and_are_collected(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "text.txt").write_text("held-out text")
    digest = in_process(capfd, "push", folder, home=home).out.strip()
    assert digest.startswith("sha256:")
    assert in_process(capfd, "pull", digest, tmp_path / "copy", home=home).code == 0
    assert (tmp_path / "copy" / "text.txt").read_text() == "held-out text"
    again = in_process(capfd, "pull", digest, tmp_path / "copy", "--json", home=home)
    assert (again.code, again.json["reason"]) == (3, "OUTPUT_EXISTS")
    assert in_process(capfd, "verify", digest, home=home).code == 0
    listing = in_process(capfd, "cache", "ls", "--json", home=home).json
    assert [entry["digest"] for entry in listing["artifacts"]] == [digest]
    assert listing["blob_bytes"] == 13
    shown = in_process(capfd, "cache", "ls", home=home).out
    assert digest not in shown
    short = next(word for word in shown.split() if word.startswith("sha256:"))
    assert digest.startswith(short)
    assert in_process(capfd, "verify", short, home=home).code == 0
    assert in_process(capfd, "pull", short, tmp_path / "by-short", home=home).code == 0
    unknown = in_process(capfd, "verify", "sha256:" + "0" * 12, "--json", home=home)
    assert (unknown.code, unknown.json["reason"]) == (3, "ARTIFACT_NOT_FOUND")
    kept = in_process(capfd, "cache", "gc", "--older-than", "1h", "--json", home=home).json
    assert kept["artifacts"] == []
    would = in_process(capfd, "cache", "gc", "--max-size", "1", "--dry-run", "--json", home=home).json
    assert (would["artifacts"], would["freed_bytes"]) == ([digest], 13)
    assert in_process(capfd, "cache", "gc", "--older-than", "0s", home=home).code == 0
    gone = in_process(capfd, "pull", digest, tmp_path / "other", "--json", home=home)
    assert (gone.code, gone.json["reason"]) == (3, "ARTIFACT_NOT_FOUND")
    assert not (tmp_path / "other").exists()


def test_what_is_not_there_is_told_with_who_named_it(
    capfd: pytest.CaptureFixture[str], home: Path, run: Path, tmp_path: Path
) -> None:
    def call(*words: str | Path, **more: str) -> Done:
        return in_process(capfd, *words, "--json", home=home, **more)

    nowhere = call("checkpoints", tmp_path / "nope")
    assert (nowhere.code, nowhere.json["remedy"]) == (3, "name the folder of a training run, or of one checkpoint")
    typed = call("export", "--checkpoint", tmp_path / "nope")
    assert typed.json["error_message"].count("it is named by checkpoint.path (--checkpoint)") == 1
    absent = {"EXPORT_BASE_MODEL": "no such/base at/all"}
    told = call("export", "--checkpoint", run, **absent).json
    assert "named by base_model.name (EXPORT_BASE_MODEL)" in told["error_message"]
    config = run / "checkpoint-5" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "no such/base at/all"}))
    told = call("export", "--checkpoint", run).json
    assert told["reason"] == "BASE_MODEL_NOT_FOUND"
    assert f"named by base_model_name_or_path in {config}" in told["error_message"]
    assert "--base-model" in told["remedy"]
    assert "check base_model.name" not in told["remedy"]


def test_an_interrupted_command_promises_to_go_on_only_where_it_does(capfd: pytest.CaptureFixture[str]) -> None:
    from slipway.cli.boundary import outcome
    from slipway.cli.output_options import OutputOptions

    for command, goes_on in (("export", True), ("stage", False), ("push", False)):

        def interrupted(asked: OutputOptions, command: str = command) -> None:
            asked.command = command
            raise KeyboardInterrupt

        assert outcome(interrupted) == 130
        assert ("to continue" in capfd.readouterr().err) is goes_on


def test_a_command_that_ends_as_a_cancelled_export_was_not_interrupted(capfd: pytest.CaptureFixture[str]) -> None:
    from slipway.cli.boundary import outcome
    from slipway.cli.output_options import OutputOptions

    def cancelled(asked: OutputOptions) -> None:
        asked.command, asked.as_json = "watch", True
        raise SystemExit(130)

    assert outcome(cancelled) == 130
    assert capfd.readouterr() == ("", "")


def test_no_message_obeys_or_imitates_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "merge\x1b[2J\n03:14:07 merge: done", None, None)
    assert PlainFormatter().format(record).partition(" ")[2] == "merge\ufffd[2J\n  03:14:07 merge: done"
    table = FittedTable(Column("name"))
    table.add_row("a\x1b]0;title\x07b\u202ec")
    show(table, Prose("warning ", "yellow", "\x9b31m"), unbroken("", "/tmp/\x1b[2J"))
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(capfd.readouterr().out)


def test_checksums_that_show_damage_travel(capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "text.txt").write_text("held-out text")
    digest = in_process(capfd, "push", tmp_path / "folder", home=home).out.strip()
    in_process(capfd, "pull", digest, tmp_path / "copy", home=home)
    (tmp_path / "copy" / "text.txt").write_text("rotten text")
    damaged = in_process(capfd, "push", tmp_path / "copy", home=home).out.strip()
    in_process(capfd, "pull", damaged, tmp_path / "again", home=home)
    assert in_process(capfd, "verify", tmp_path / "again", home=home).code == 7


def test_a_pulled_artifact_can_be_verified_and_pushed_again(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    (folder / "deep").mkdir(parents=True)
    (folder / "text.txt").write_text("held-out text")
    (folder / "deep" / "more.txt").write_text("more of it")

    def call(*words: str | Path) -> Done:
        return in_process(capfd, *words, "--json", home=home)

    digest = call("push", folder).json["digest"]
    assert call("pull", digest, copy).json["files"] == 2
    assert call("verify", copy).json == {"path": str(copy), "files": 2, "success": True}
    assert subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "MANIFEST.sha256"], cwd=copy).returncode == 0
    assert call("push", copy).json["digest"] == digest

    (copy / "deep" / "more.txt").write_text("less of it")
    (copy / "text.txt").unlink()
    (copy / "odd").touch()
    found = call("verify", copy)
    assert (found.code, found.json["reason"]) == (7, "ARTIFACT_CORRUPT")
    assert json.loads(found.json["about"]["faults"]) == [
        "deep/more.txt: does not have its checksum",
        "text.txt: missing",
        "odd: not in MANIFEST.sha256",
    ]
    assert found.json["remedy"] == "pull the artifact again into another folder"


def test_a_damaged_artifact_in_the_store_is_found_by_its_digest(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "text.txt").write_text("held-out text")
    digest = in_process(capfd, "push", tmp_path / "folder", home=home).out.strip()
    assert in_process(capfd, "verify", digest, "--json", home=home).json["files"] == 1
    (blob,) = (
        path
        for path in (home / "store" / "blobs").rglob("*")
        if path.is_file() and path.read_bytes() == b"held-out text"
    )
    blob.chmod(0o644)
    blob.write_text("tampered text")
    found = in_process(capfd, "verify", digest, "--json", home=home)
    assert (found.code, found.json["reason"]) == (7, "ARTIFACT_CORRUPT")


def test_a_folder_without_checksums_is_told_where_they_are(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    (tmp_path / "out" / "pytorch").mkdir(parents=True)
    alone = in_process(capfd, "verify", tmp_path / "out" / "pytorch", "--json", home=home)
    assert (alone.code, alone.json["reason"]) == (3, "ARTIFACT_INVALID")
    assert "slipway pull" in alone.json["remedy"]
    (tmp_path / "out" / "MANIFEST.sha256").touch()
    below = in_process(capfd, "verify", tmp_path / "out" / "pytorch", "--json", home=home)
    assert f"name {tmp_path / 'out'}" in below.json["remedy"]


@pytest.mark.parametrize("words", [["--older-than", "soon"], ["--max-size", "big"]])
def test_limits_that_are_none_are_refused(capfd: pytest.CaptureFixture[str], home: Path, words: list[str]) -> None:
    assert in_process(capfd, "cache", "gc", *words, home=home).code == 3


def test_collection_spares_what_unfinished_exports_use(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    from slipway_coordinator.model.records import ExportRecord
    from slipway_coordinator.storage.database import Database

    digests = []
    for name in ("used", "unused"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        digests.append(in_process(capfd, "push", tmp_path / name, home=home).out.strip())
    state = home / "exports" / "e-1" / "state.db"
    state.parent.mkdir(parents=True)
    database = Database(f"sqlite:///{state}")
    database.prepare()
    record = ExportRecord(
        name="projects/default/exports/e-1",
        configuration={},
        request_hash="x",
        sources={"base": digests[0]},
        tasks=(),
        create_time=0.0,
    )
    assert database.insert(record)
    database.close()
    done = in_process(capfd, "cache", "gc", "--older-than", "0s", "--json", home=home).json
    assert done["artifacts"] == [digests[1]]


def test_collection_takes_what_interrupted_stages_left(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    folder = home / "scratch" / f".merge.slipway-kept-{'0' * 64}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(5000))
    assert in_process(capfd, "cache", "gc", "--json", home=home).json["kept"] == []
    would = in_process(capfd, "cache", "gc", "--older-than", "0s", "--dry-run", home=home)
    assert folder.name in "".join(would.out.split())
    done = in_process(capfd, "cache", "gc", "--older-than", "0s", "--json", home=home).json
    assert (done["kept"], done["freed_bytes"]) == ([folder.name], 5000)
    assert not folder.exists()


def test_one_stage_alone(capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "text.txt").write_text("abc")
    given = ("--input", f"in={tmp_path / 'in'}", "--param", "text=hi", "--param", "seconds=0.1")
    words = ("stage", "support.stages.plain:ECHO", *given, "--out", tmp_path / "out")
    done = in_process(capfd, *words, "--json", "--progress", "json", home=home)
    assert done.code == 0, done.err
    assert done.json["facts"] == {"length": 2}
    folder = Path(done.json["outputs"]["out"])
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"text.txt": "hi", "in-text.txt": "abc"}
    events = [json.loads(line) for line in done.err.splitlines()]
    assert [event["state"] for event in events if event.get("event") == "task"] == ["running", "succeeded"]
    assert any(event.get("unit") == "ms" for event in events)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    assert in_process(capfd, *words, home=home).code == 3


def test_one_stage_alone_puts_signal_handlers_back(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    """The command's own, for SIGTERM while the outputs are moved to their place."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "text.txt").write_text("abc")
    words = ("stage", "support.stages.plain:ECHO", "--input", f"in={tmp_path / 'in'}", "--param", "text=hi")
    before = {number: signal.signal(number, _ignored) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert in_process(capfd, *words, "--out", tmp_path / "out", home=home).code == 0
        assert {signal.getsignal(number) for number in before} == {_ignored}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignored(number: int, frame: object) -> None: ...


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nonesuch"], "STAGE_UNKNOWN"),
        (["merge", "--input", "base"], "PARAMS_INVALID"),
        (["merge", "--input", "base=/nowhere"], "INPUT_MISSING"),
        (["merge", "--input", "base=/", "--input", "base=/nowhere"], "PARAMS_INVALID"),
        (["merge", "--param", "dtype=float32", "--param", "dtype=bfloat16"], "PARAMS_INVALID"),
        (["merge", "--input", "base=/nowhere", "--input", "adapter=/nowhere"], "FILE_ERROR"),
        (["merge", "--input", "base=/", "--input", "adapter=/", "--param", "dtype=int3"], "PARAMS_INVALID"),
    ],
)
def test_a_stage_that_cannot_run_says_why(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path, words: list[str], reason: str
) -> None:
    done = in_process(capfd, "stage", *words, "--out", tmp_path / "out", "--json", home=home)
    assert (done.code, done.json["reason"]) == (3, reason)
    assert not (tmp_path / "out").exists()


def test_a_stage_that_fails_is_not_said_to_have_succeeded(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    words = ("stage", "support.stages.plain:TROUBLE", "--param", "kind=typed", "--out", tmp_path / "out", "--json")
    done = in_process(capfd, *words, home=home, SLIPWAY_PROGRESS="json")
    assert (done.code, done.json["reason"]) == (3, "ADAPTER_TENSOR_UNUSED")
    events = [json.loads(line) for line in done.err.splitlines()]
    assert (events[-1]["event"], events[-1]["reason"]) == ("error", "ADAPTER_TENSOR_UNUSED")
    last = [event for event in events if event.get("event") == "task"][-1]
    assert (last["state"], last["reason"]) == ("failed", "ADAPTER_TENSOR_UNUSED")


def test_no_coordinator_is_a_usage_error_and_an_absent_one_is_unavailable(
    capfd: pytest.CaptureFixture[str], home: Path
) -> None:
    assert in_process(capfd, "watch", "e-1", home=home).code == 2
    done = in_process(capfd, "get", "e-1", "--coordinator", "127.0.0.1:9", "--json", home=home)
    assert (done.code, done.json["reason"]) == (7, "COORDINATOR_UNAVAILABLE")
    done = in_process(capfd, "get", "e-1", "--coordinator", "coordinator", "--json", home=home)
    assert (done.code, done.json["reason"]) == (3, "CONFIGURATION_INVALID")


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A coordinator with a store, and nobody who works."""
    with Harness(tmp_path_factory.mktemp("coordinator"), with_worker=False) as running:
        yield running


def test_exports_are_submitted_with_a_priority_and_listed_by_a_filter(
    capfd: pytest.CaptureFixture[str], home: Path, harness: Harness, run: Path
) -> None:
    def call(*words: str | Path) -> Done:
        return in_process(capfd, *words, "--coordinator", harness.address, "--json", home=home)

    made = call("submit", "--checkpoint", run, "--base-model", run.parent / "base", "--priority", "7").json
    assert made["priority"] == 7
    listed = {text: call("list", "--filter", text).json["exports"] for text in ("", "state!=failed", "state=failed")}
    assert {text: [export["name"] for export in found] for text, found in listed.items()} == {
        "": [made["name"]],
        "state!=failed": [made["name"]],
        "state=failed": [],
    }
    told = in_process(
        capfd,
        "submit",
        "--checkpoint",
        run,
        "--base-model",
        run.parent / "base",
        "--coordinator",
        harness.address,
        home=home,
    )
    name = made["name"].rpartition("/")[2]
    assert told.out.startswith("checkpoint-5 of run onto base")
    assert f"slipway watch {name} --coordinator {harness.address}" in told.err
    again = f"slipway export --base-model {run.parent / 'base'} --checkpoint {run} --coordinator {harness.address}"
    assert again in [line.strip() for line in told.err.splitlines()]
    wrong = call("list", "--filter", "colour=red")
    assert (wrong.code, wrong.json["reason"]) == (3, "REQUEST_INVALID")
    assert call("submit", "--priority", "1000").code == 2


def test_digests_are_looked_up_at_the_coordinator_that_is_named(
    capfd: pytest.CaptureFixture[str], home: Path, harness: Harness, run: Path
) -> None:
    """By who has no store: a plan, the checkpoints of a run, and an artifact's checksums, with damage found."""

    def call(*words: str | Path) -> Done:
        return in_process(capfd, *words, "--coordinator", harness.address, "--json", home=home)

    adapter, base = (call("push", folder).json["digest"] for folder in (run, run.parent / "base"))
    planned = call("export", "--plan", "--checkpoint", adapter, "--base-model", base)
    assert planned.code == 0, planned.out
    assert planned.json["sources"] == {"base": base, "checkpoint": f"{adapter}/checkpoint-5", "heldout": None}
    found = call("checkpoints", adapter).json
    assert found["latest"] == f"{adapter}/checkpoint-5"
    assert call("verify", base).json == {
        "path": base,
        "files": len(list((run.parent / "base").iterdir())),
        "success": True,
    }
    assert not (home / "store").exists()

    absent = "sha256:" + "0" * 64
    for words in (("checkpoints", absent), ("verify", absent), ("export", "--plan", "--checkpoint", absent)):
        done = call(*words)
        assert done.code == 3
        assert "ARTIFACT_NOT_FOUND" in done.out
    blob = max((harness.store.root / "blobs").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    blob.chmod(0o644)
    blob.write_bytes(bytes(blob.stat().st_size))
    damaged = [call("verify", digest) for digest in (adapter, base)]
    assert sorted(done.code for done in damaged) == [0, 7]
    assert {done.json.get("reason") for done in damaged} == {None, "ARTIFACT_CORRUPT"}
    assert list((home / "scratch").iterdir()) == []


def test_the_shell_completes_commands_flags_and_stages(home: Path) -> None:
    def complete(*words: str) -> list[str]:
        line = {"COMP_WORDS": " ".join(("slipway", *words)), "COMP_CWORD": str(len(words))}
        return slipway(home=home, _SLIPWAY_COMPLETE="complete_bash", **line).out.split()

    assert complete("exp") == ["export"]
    assert complete("export", "--base") == ["--base-model"]
    assert complete("stage", "onnx") == ["onnx_export"]


@pytest.fixture
def obeying_permissions() -> list[str]:
    """What runs a command so that it obeys the mode of files, as everybody but root does anyway."""
    if os.geteuid() != 0:
        return []
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("root cannot be made to obey permissions here")
    return command


def test_a_checkpoint_that_may_not_be_read_is_named_and_not_taken(
    run: Path, home: Path, obeying_permissions: list[str]
) -> None:
    locked = run / "checkpoint-20"
    locked.mkdir()
    locked.chmod(0o000)
    try:
        done = subprocess.run(
            [*obeying_permissions, SLIPWAY, "checkpoints", str(run), "--json"],
            env=environment(home),
            capture_output=True,
            text=True,
        )
    finally:
        locked.chmod(0o755)
    assert done.returncode == 0, done.stderr
    by_name = {Path(found["path"]).name: found for found in json.loads(done.stdout)["checkpoints"]}
    assert by_name["checkpoint-20"]["problems"]
    assert by_name["checkpoint-5"]["healthy"]
