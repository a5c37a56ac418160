"""The test targets of the Makefile: what they run, in which order, on how many workers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHECK = ROOT / ".ci" / "run"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def pytest_calls(*words: str) -> list[str]:
    """Return the pytest commands that make would run."""
    return [line.partition(" -m pytest ")[2] for line in dry_run(*words) if " -m pytest " in line]


def dry_run(*words: str) -> list[str]:
    """Return the commands that make would run."""
    # These tests may be run by make themselves, with a seed of their own.
    plain = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "SEED", "WORKERS")
    }
    done = subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, env=plain, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_the_tests_are_shuffled_anew_unless_a_seed_is_given() -> None:
    (call,) = pytest_calls("test")
    assert "-n 3" in call
    assert "seed" not in call
    (call,) = pytest_calls("test", "SEED=1234", "WORKERS=4")
    assert "-n 4" in call
    assert "--randomly-seed=1234" in call


def test_slow_tests_run_with_all_others_only() -> None:
    (call,) = pytest_calls("test")
    assert "-m 'not slow and not trained and not cluster'" in call
    (trained,) = pytest_calls("test-trained")
    assert "-m 'trained and not slow'" in trained
    cluster, everything = pytest_calls("test-all")
    assert "-m cluster" in cluster
    assert "-m" not in everything  # but for what pyproject.toml leaves out, which ran before


def test_the_tests_of_manifests_are_shuffled_and_spread_as_all_others() -> None:
    (call,) = pytest_calls("test-k8s", "SEED=1234", "WORKERS=4")
    assert "-n 4" in call
    assert "--randomly-seed=1234" in call
    assert "tests/k8s" in call


def test_the_check_of_a_change_pins_the_order() -> None:
    text = CHECK.read_text()
    for target in ("test", "test-trained", "test-k8s", "test-deepspeed"):
        assert re.findall(rf"^make {target} (.*)$", text, flags=re.MULTILINE) == ["SEED=1"]


def test_a_commit_is_checked_by_what_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = dry_run("--always-make", "lint")[-len(hooks) :]
    assert [hook["entry"] for hook in hooks] == [line.removesuffix(" .") for line in lint]


def test_an_earlier_version_is_built_where_one_is_given() -> None:
    script = "tests/upgrade/tools/previous.sh"
    (line,) = [line for line in dry_run("test-upgrade", "PREVIOUS=v0.1.0") if "tests/upgrade" in line]
    assert f"{script} 'v0.1.0'" in line
    (line,) = [line for line in dry_run("test-upgrade") if "tests/upgrade" in line]
    assert line.startswith("folder= &&")
    assert script not in line
    for words, message in (((), "name one commit"), (("no-such-commit",), "no commit no-such-commit")):
        done = subprocess.run([ROOT / script, *words], capture_output=True, text=True)
        assert done.returncode
        assert message in done.stderr


def test_what_make_installs_it_removes() -> None:
    done = subprocess.run(["make", "--dry-run", "clean"], cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("rm ")]
    assert {".venv", "demo", "demo-real", ".k8s-tools", ".deepspeed", ".previous", ".site"} <= set(line.split())


def test_the_site_is_built_strictly_and_is_part_of_the_check_of_a_change() -> None:
    # Always: what this checkout has built and installed already would not be printed.
    dry_run = ["make", "--dry-run", "--always-make", "docs"]
    done = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "mkdocs build --strict" in done.stdout
    assert "-c constraints.txt -e '.[docs]'" in done.stdout
    assert "make docs\n" in CHECK.read_text()


def checked_with(folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run the check of a change where there are a shell's own programs and these scripts alone."""
    for tool in ("bash", "dirname", "env", "mktemp", "chmod", "rm"):
        found = shutil.which(tool)
        assert found
        (folder / tool).symlink_to(found)
    for name, text in {"make": "exit 0", **programs}.items():
        script = folder / name
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    return subprocess.run([CHECK], env={"PATH": str(folder)}, capture_output=True, text=True)


@pytest.mark.slow
def test_the_check_of_a_change_says_what_was_not_tested_for_want_of_a_tool(tmp_path: Path) -> None:
    done = checked_with(tmp_path, id="echo 1000")
    assert done.returncode == 0
    for tool in ("chromium", "promtool", "grpcurl", "kubectl", "npm", "buildah or debootstrap"):
        assert f"skipped, as there is no {tool}: " in done.stderr
    (tmp_path / "kubectl").symlink_to(tmp_path / "make")
    again = subprocess.run([CHECK], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert "no kubectl" not in again.stderr


@pytest.mark.slow
def test_a_package_that_cannot_be_had_keeps_no_other_away(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    apt = f'echo "$@" >>{calls}; case "$*" in *chromium*|*grpcurl*) exit 100;; esac'
    done = checked_with(tmp_path, **{"id": "echo 0", "apt-get": apt})
    assert done.returncode == 0
    for package in ("chromium", "grpcurl"):
        assert f"not installed: {package}" in done.stderr
    made = calls.read_text().splitlines()
    installed = [line.split()[-1] for line in made if " install " in line]
    assert installed == ["chromium", "fonts-dejavu-core", "grpcurl", "haproxy", "nodejs", "npm"]
    assert [line for line in made if "prometheus" in line] == ["-qq download prometheus"], "it is a service"
