"""The command lines of the services: their help, and what they refuse before anything starts."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from slipway.errors import ModelExportError
from slipway.service_flags import at_least, worker_parser
from slipway_coordinator.service import coordinator_parser
from slipway_coordinator.storage.database_access import state_at
from support.commands.cli import SLIPWAY, run_here, slipway

COMMANDS = {"worker": worker_parser, "coordinator": coordinator_parser}
STATE = {"worker": [], "coordinator": ["--state", "x"]}


def test_no_module_can_be_started_in_place_of_the_command() -> None:
    """``python -m`` would import from the current folder before anything of Slipway can keep it from that."""
    root = Path(__file__).parents[3]
    assert [path for part in ("shared", "services") for path in (root / part).rglob("__main__.py")] == []


@pytest.mark.parametrize("service", sorted(COMMANDS))
def test_the_help_has_examples_that_are_taken(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    monkeypatch.delenv("SLIPWAY_STATE", raising=False)
    assert run_here(service, "--help") == 0
    shown = re.findall(rf"^  \$ slipway {service} (.*)$", capfd.readouterr().out, re.MULTILINE)
    assert len(shown) == 2
    for arguments in shown:
        COMMANDS[service](service).parse_args(shlex.split(arguments))
    assert run_here(service, "--lease-seconds=0", "--slots=0", "--state=x") == 2
    assert "is not 1" in capfd.readouterr().err


@pytest.mark.parametrize("level", ["debug", "DEBUG", "Debug"])
def test_the_log_level_is_taken_in_any_case(level: str) -> None:
    for name, parser in COMMANDS.items():
        assert parser(name).parse_args(["--log-level", level, *STATE[name]]).log_level == "DEBUG"


def test_shared_flags_are_the_same_in_both_services() -> None:
    ours, theirs = (
        {flag: vars(action) for action in parser(name)._actions for flag in action.option_strings}
        for name, parser in COMMANDS.items()
    )
    shared = {"--metrics", "--log-level", "--log-format", "--access-file", "--health-listen", "--tls-ca-file"}
    assert shared <= ours.keys() & theirs.keys()
    for flag in shared:
        assert (ours[flag]["help"], ours[flag]["default"]) == (theirs[flag]["help"], theirs[flag]["default"])


def test_a_service_without_its_libraries_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "dbos.py").write_text("raise ModuleNotFoundError(\"No module named 'dbos'\", name='dbos')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = slipway("coordinator", "--state", "x", home=tmp_path, PYTHONPATH=path)
    assert done.code == 6
    assert "dbos is not installed" in done.err
    assert "pip install" in done.err
    assert "Traceback" not in done.err
    assert slipway("coordinator", "--help", home=tmp_path, PYTHONPATH=path).code == 0


@pytest.mark.parametrize(
    ("service", "arguments"),
    [
        ("coordinator", "--state x --retain-days -1"),  # would forget what ended just now
        ("coordinator", "--state x --lease-seconds 0"),
        ("coordinator", "--state x --max-exports 0"),
        ("coordinator", "--state x --lease-seconds nan"),
        ("worker", "--slots 0"),
        ("worker", "--slots 1.5"),
        ("worker", "--drain-seconds -1"),
    ],
)
def test_impossible_numbers_are_refused(capsys: pytest.CaptureFixture[str], service: str, arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMANDS[service](service).parse_args(arguments.split())
    assert ended.value.code == 2
    flag, value = arguments.split()[-2:]
    error = capsys.readouterr().err.splitlines()[-1]
    assert flag in error
    assert value in error


def test_numbers_within_their_limits() -> None:
    assert at_least(0.0)("0.5") == 0.5
    assert at_least(1)("1") == 1
    for text in ("0", "x", "1e3"):
        with pytest.raises(argparse.ArgumentTypeError):
            at_least(1)(text)
    with pytest.raises(argparse.ArgumentTypeError):
        at_least(0.0)("inf")


def test_what_cannot_hold_a_state_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a list of things to buy")
    (tmp_path / "empty").touch()
    for wrong in (tmp_path, tmp_path / "text", tmp_path / "text" / "below", tmp_path / "nowhere" / "state.db"):
        with pytest.raises(ModelExportError, match="path of a file") as caught:
            state_at(str(wrong))
        assert caught.value.reason == "REQUEST_INVALID"
    for right in ("empty", "new"):
        assert str(state_at(str(tmp_path / right))) == str(tmp_path / right)


def test_a_state_that_cannot_be_written_is_refused(small_disk: Path) -> None:
    state = small_disk / "state.db"
    state.touch()
    assert str(state_at(str(state))) == str(state)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for place in (state, small_disk / "new.db"):
        with pytest.raises(ModelExportError, match="cannot be written") as caught:
            state_at(str(place))
        assert caught.value.failure().exit_code == 3


@pytest.mark.parametrize("command", ["serve", "migrate"])
def test_a_state_in_a_folder_that_is_not_there_is_bad_input(tmp_path: Path, command: str) -> None:
    """Not a database that is away, which would be tried again for ever; and no folder is made."""
    program = [SLIPWAY, "coordinator", command, "--listen", "127.0.0.1:0", "--state"]
    ended = subprocess.run([*program, str(tmp_path / "no" / "s.db")], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stderr.partition(":")[0]) == (3, "REQUEST_INVALID")
    assert not (tmp_path / "no").exists()


def test_a_port_that_is_none_is_refused(tmp_path: Path) -> None:
    """gRPC would listen on what is left above 65535."""
    place = ["--listen", "127.0.0.1:99999", "--state", str(tmp_path / "state.db")]
    command = [SLIPWAY, "coordinator", *place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 3, done.stderr
    assert "the highest port is 65535" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "place",
    ["host=127.0.0.1 user=u password=a-password", " password = 'a-password'", "postgresql://u:a@b/a-password@host/db"],
)
def test_an_address_of_a_database_in_another_form_becomes_no_file_and_is_not_repeated(place: str) -> None:
    with pytest.raises(ModelExportError) as caught:
        state_at(place)
    assert caught.value.reason == "REQUEST_INVALID"
    assert "a-password" not in repr(caught.value.failure())
