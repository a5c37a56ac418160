"""A report that no message can carry as it is fails its test, not the worker that runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.harness.encodable_reports import sendable

TESTS = r"""
import logging
import warnings
from pathlib import Path

import pytest

HALF = "half \ud800"

def test_logs():
    logging.getLogger("any").warning(HALF)
    print(HALF)
    assert False

def test_asserts():
    assert HALF == ""

def test_raises():
    raise ValueError(HALF)

@pytest.mark.parametrize("text", [HALF, "whole"], ids=["\udc80", "b"])
def test_is_named(text):
    assert text == "whole"

def test_has_properties(record_property):
    record_property("text", HALF)
    record_property("path", Path("x"))

def test_warns():
    warnings.warn(HALF)

def test_skips():
    pytest.skip(HALF)

@pytest.fixture
def broken():
    raise ValueError(HALF)

def test_cannot_be_set_up(broken):
    pass
"""


def test_no_report_ends_a_worker(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    options = "-m pytest -p xdist.plugin -n 1 -ra -p support.harness.encodable_reports -p no:cacheprovider test_it.py"
    command = [sys.executable, *options.split()]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=alone)
    assert "4 failed, 3 passed, 1 skipped, 1 warning, 1 error" in done.stdout, done.stdout
    assert r"half \ud800" in done.stdout
    assert "INTERNALERROR" not in done.stdout
    assert "crashed" not in done.stdout


def test_what_can_be_sent_stays_as_it_is() -> None:
    value = {"a": [1, 2.5, None, True, ("b", b"c")], "d": {"e"}}
    assert sendable(value) == value
    assert sendable({"path": Path("x"), "text": "\ud800"}) == {"path": "PosixPath('x')", "text": "\\ud800"}
