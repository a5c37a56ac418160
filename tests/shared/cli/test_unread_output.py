"""Commands whose output cannot be read or written end quietly, with a documented exit code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slipway.reasons import EXIT_CODES
from slipway.terminal.streams import EXIT_UNREAD
from support.commands.cli import SLIPWAY, environment


def unread(*words: str, home: Path, closed: str) -> subprocess.CompletedProcess[str]:
    """Run a command with one stream whose reader is already gone."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {closed: writer}
    try:
        return subprocess.run(
            [SLIPWAY, *words], env=environment(home), stdin=subprocess.DEVNULL, text=True, timeout=240, **streams
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize("words", [["--help"], ["doctor"], ["doctor", "--json"], ["token", "--help"]], ids=" ".join)
def test_an_answer_that_nobody_reads(words: list[str], tmp_path: Path) -> None:
    done = unread(*words, home=tmp_path, closed="stdout")
    assert (done.returncode, done.stderr) == (EXIT_UNREAD, "")
    assert EXIT_UNREAD in EXIT_CODES


@pytest.mark.parametrize(("words", "closed"), [(["get", "e-0"], "stderr"), (["get", "e-0", "--json"], "stdout")])
def test_a_failure_that_nobody_hears_of_is_one(words: list[str], closed: str, tmp_path: Path) -> None:
    done = unread(*words, home=tmp_path, closed=closed)
    assert done.returncode == 3
    assert "Traceback" not in f"{done.stdout}{done.stderr}"
    assert "BrokenPipe" not in f"{done.stdout}{done.stderr}"


def test_progress_that_nobody_reads_ends_the_work(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    words = [
        "stage",
        "merge",
        "--input",
        f"base={tmp_path / 'in'}",
        "--input",
        f"adapter={tmp_path / 'in'}",
        "--out",
        "x",
    ]
    done = unread(*words, home=tmp_path, closed="stderr")
    assert done.returncode in {3, EXIT_UNREAD}  # the failure, where that came first
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("redirection", "words", "code"),
    [
        (">&-", "doctor", 0),
        (">&-", "list --json", 0),
        ("2>&-", "verify nonesuch", 3),
        ("<&- >&- 2>&-", "verify nonesuch --json", 3),
        (">/dev/full", "doctor --json", 5),
        (">/dev/full", "--help", 5),
        ("2>/dev/full", "verify nonesuch", 3),
        (">/dev/full 2>/dev/full", "verify nonesuch --json", 3),
    ],
)
def test_closed_and_full_streams_change_no_failure(redirection: str, words: str, code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{SLIPWAY} {words} {redirection}"], env=environment(tmp_path), capture_output=True, text=True
    )
    assert (done.returncode, "Traceback" in done.stdout + done.stderr) == (code, False)
