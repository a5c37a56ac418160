"""A test that ends its process is a failure with a trace, and the tests behind it run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_FILE = """
import ctypes, os
import pytest
pytestmark = pytest.mark.own_process

@pytest.fixture(scope="module")
def process():
    return os.getpid()

def test_a(process):
    assert os.getpid() == process != os.getppid()

def test_b(process, tmp_path):
    assert os.getpid() == process, "fixtures of the file are made once"
    assert tmp_path.is_dir()

def test_c_is_wrong():
    assert "left" == "right"

def test_d_ends_the_process():
    ctypes.string_at(0)

def test_e():
    pass

@pytest.mark.skip(reason="a reason")
def test_f():
    pass

def test_z_in_a_process_that_lives():
    pass
"""
_PLAIN = """
def test_plain():
    pass
"""
_CONFTEST = 'pytest_plugins = ["support.harness.own_process"]\n'


def test_native_code_that_ends_its_process_loses_no_report(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    for folder, text in (("a", _PLAIN), ("b", _FILE), ("c", _PLAIN)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    own_process: as in the project\n")
    for workers in ((), ("-n", "1")):
        command = [sys.executable, "-P", "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", "-ra", *workers]
        done = subprocess.run(
            [*command, f"--basetemp={tmp_path / 'base'}", "a", "b", "c"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "2 failed, 6 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
        assert "test_d_ends_the_process ended its process with exit status -11" in done.stdout
        assert "Segmentation fault" in done.stdout
        assert "assert 'left' == 'right'" in done.stdout
        assert "a reason" in done.stdout
        assert "node down" not in done.stdout
