"""The command line without an export: help, exit codes, JSON, and the commands that need no coordinator."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from slipway.observability.logs import PlainFormatter
from slipway.terminal.columns import Column, FittedTable, Prose
from slipway.terminal.console import show, unbroken_line
from support.commands.cli import SLIPWAY, Done, environment, in_process, slipway

COMMANDS = (
    *("export", "submit", "get", "list", "watch", "cancel", "retry", "delete", "formats", "workers", "projects"),
    *("doctor", "checkpoints", "stage", "sample", "verify", "push", "pull", "cache"),
    *("coordinator", "worker", "token"),
)


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
    """Return the processor time of this process's ended children."""
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
print(sorted({"torch", "grpc", "pydantic", "transformers", "dbos", "hashlib", "tempfile"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(home),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_a_stage_starts_without_what_reports_are_made_of() -> None:
    code = "import sys, slipway.cli.stages.running as _; print([name for name in sys.modules if name.startswith('slipway.results')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
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
    assert stages == [
        "merge",
        "calibration_data",
        "calibrate-int4",
        "quantize-pytorch-int8",
        "quantize-pytorch-int4",
        "reference",
        "validate",
    ]
    checks = {finding["check"]: finding for finding in plan["preflight"]["findings"]}
    assert {"disk: SLIPWAY_HOME", "memory", "stage: merge", "stage: quantize", "stage: validate"} <= set(checks)
    assert "needed" in checks["disk: SLIPWAY_HOME"]["message"]
    assert plan["preflight"]["task_bytes"]["merge"] > 8 * 16 * 4  # the weights, and what lies beside them
    text = in_process(capfd, "export", *where, *settings, "--plan", home=home).out
    assert "quantize-pytorch-int4" in text
    assert "--set optimization.quantization" in text
    assert str(run / "checkpoint-10") in text  # what was chosen, not only what was asked for
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        (["--layers", "0,last"], ["0", "last"]),
        (["--all-layers"], ["all"]),
        (["--set", "formats.onnx.activations=layers=1"], ["1"]),
    ],
)
def test_layers_to_look_into_are_chosen_by_a_flag(
    capfd: pytest.CaptureFixture[str],
    home: Path,
    tmp_path: Path,
    run: Path,
    words: list[str],
    layers: list[str],
) -> None:
    where = ("--checkpoint", run, "--base-model", run.parent / "base", "--out", tmp_path / "out")
    done = in_process(capfd, "export", *where, *words, "--plan", "--json", home=home)
    assert done.code == 0, done.err
    (params,) = [task["params"] for task in done.json["tasks"] if task["id"] == "onnx_export"]
    assert params["activations"]["layers"] == layers
    assert any(name.startswith("formats.onnx.activations") for name in done.json["origins"])


def test_flags_for_layers_exclude_each_other(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path, run: Path
) -> None:
    where = ("--checkpoint", run, "--base-model", run.parent / "base", "--out", tmp_path / "out")
    done = in_process(capfd, "export", *where, "--layers", "0", "--all-layers", "--plan", home=home)
    assert done.code == 2
    assert "exclude each other" in done.err


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
    assert all("pip install" in provider["detail"] or provider["detail"] == "the same" for provider in missing)
    assert any("pip install" in provider["detail"] for provider in missing)
    assert {entry["name"] for entry in done.json["formats"]} >= {"pytorch", "onnx", "tensorrt"}
    assert done.json["machine"]["memory_bytes"] > 1 << 30
    assert "tensorrt_build" in in_process(capfd, "doctor", home=home).out


def test_an_interrupted_command_promises_to_go_on_only_where_it_does(capfd: pytest.CaptureFixture[str]) -> None:
    from slipway.cli.boundary import outcome
    from slipway.cli.options import OutputOptions

    for command, goes_on in (("export", True), ("stage", False), ("push", False)):

        def interrupted(asked: OutputOptions, command: str = command) -> None:
            asked.command = command
            raise KeyboardInterrupt

        assert outcome(interrupted) == 130
        assert ("to continue" in capfd.readouterr().err) is goes_on


def test_a_command_that_ends_as_a_cancelled_export_was_not_interrupted(capfd: pytest.CaptureFixture[str]) -> None:
    from slipway.cli.boundary import outcome
    from slipway.cli.options import OutputOptions

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
    show(table, Prose("warning ", "yellow", "\x9b31m"), unbroken_line("", "/tmp/\x1b[2J"))
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(capfd.readouterr().out)


def test_the_shell_completes_commands_flags_and_stages(home: Path) -> None:
    def complete(*words: str) -> list[str]:
        line = {"COMP_WORDS": " ".join(("slipway", *words)), "COMP_CWORD": str(len(words))}
        return slipway(home=home, _SLIPWAY_COMPLETE="complete_bash", **line).out.split()

    assert complete("exp") == ["export"]
    assert complete("export", "--base") == ["--base-model"]
    assert complete("stage", "onnx") == ["onnx_export"]


def test_the_run_may_be_the_argument_and_is_given_once(
    run: Path, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str | Path) -> Done:
        return in_process(capfd, "export", *words, "--base-model", run.parent / "base", "--plan", "--json", home=home)

    plan = call(run, "-f", "gguf:q4_k_m").json
    assert plan["sources"]["checkpoint"] == str(run / "checkpoint-5")
    assert {task["format"] for task in plan["tasks"]} - {"", "validation"} == {"gguf-q4_k_m"}
    assert plan["origins"]["checkpoint.path"] == "RUN"
    assert plan["origins"]["formats.gguf.quantization"] == "-f gguf:q4_k_m"
    for words, why in (((run, "--checkpoint", run), "give one of them"), (("export.yaml",), "-c export.yaml")):
        done = call(*words)
        assert done.code == 2
        assert why in " ".join(done.err.replace("│", " ").split())


@pytest.fixture
def obeying_permissions() -> list[str]:
    """Return the words that run a command without the privilege of root to read every file."""
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
