"""The test targets of the Makefile: what they run, in which order, on how many workers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def pytest_calls(*words: str) -> list[str]:
    """What make would run of pytest."""
    # These tests may be run by make themselves, with a seed of their own.
    plain = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "SEED", "WORKERS")
    }
    done = subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, env=plain, capture_output=True, text=True, check=True
    )
    return [line.partition(" -m pytest ")[2] for line in done.stdout.splitlines() if " -m pytest " in line]


def test_the_tests_are_shuffled_anew_unless_a_seed_is_given() -> None:
    (call,) = pytest_calls("test")
    assert "-n 2" in call
    assert "seed" not in call
    (call,) = pytest_calls("test", "SEED=1234", "WORKERS=4")
    assert "-n 4" in call
    assert "--randomly-seed=1234" in call


def test_slow_tests_run_with_all_others_only() -> None:
    (call,) = pytest_calls("test")
    assert "-m 'not slow and not cluster'" in call
    cluster, everything = pytest_calls("test-all")
    assert "-m cluster" in cluster
    assert "-m" not in everything  # but for what pyproject.toml leaves out, which ran before


def test_the_check_of_a_change_pins_the_order() -> None:
    assert re.search(r"^make test SEED=\d+$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
