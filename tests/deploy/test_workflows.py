"""The workflows of GitHub: of the right form, with nothing unsafe in them, and with commands that are there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
PATHS = sorted(WORKFLOWS.glob("*.yaml"))
BIN = Path(sys.executable).parent


def run(program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / program, *words], capture_output=True, text=True, timeout=120)


def audit(path: Path) -> subprocess.CompletedProcess[str]:
    return run("zizmor", "--offline", "--no-progress", path)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_they_have_the_form_that_github_takes(path: Path) -> None:
    done = run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", path)
    assert done.returncode == 0, done.stdout


def test_nothing_unsafe_is_found_in_them() -> None:
    done = audit(WORKFLOWS)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("safe", "unsafe", "found"),
    [
        (r"actions/checkout@[0-9a-f]{40}", "actions/checkout@v7", "unpinned-uses"),
        ("pull_request:", "pull_request_target:", "dangerous-triggers"),
        (r"run: \.ci/run", "run: echo ${{ github.event.pull_request.title }}", "template-injection"),
    ],
)
def test_the_audit_finds_what_it_is_for(tmp_path: Path, safe: str, unsafe: str, found: str) -> None:
    copy = tmp_path / ".github" / "workflows" / "check.yaml"
    copy.parent.mkdir(parents=True)
    shutil.copy(WORKFLOWS / "check.yaml", copy)
    text, changed = re.subn(safe, lambda _: unsafe, copy.read_text())
    assert changed
    copy.write_text(text)
    done = audit(copy)
    assert done.returncode != 0
    assert found in done.stdout


def test_their_commands_are_there() -> None:
    text = "\n".join(path.read_text() for path in PATHS)
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", text))
    assert asked
    assert asked <= targets
    scripts = set(re.findall(r"(?<![\w/])(\.ci/run|deploy/[\w/]+\.(?:sh|py))", text))
    assert scripts >= {".ci/run", "deploy/build.sh", "deploy/release/set_version.py"}
    assert all((ROOT / script).is_file() for script in scripts)


DOCKER = """#!/bin/bash
case "$1" in
    info | build | tag) ;;
    push) exit %d ;;
    inspect) echo "r.example.org/team/slipway-merge@%s" ;;
esac
"""


@pytest.mark.parametrize(
    ("pushed", "digest", "code", "said"),
    [
        (0, f"sha256:{'0' * 64}", 0, ""),
        (1, f"sha256:{'0' * 64}", 1, ""),
        (0, "", 1, "docker did not say the digest of r.example.org/team/slipway-merge:"),
    ],
)
def test_an_image_that_was_not_pushed_is_no_success(
    tmp_path: Path, pushed: int, digest: str, code: int, said: str
) -> None:
    docker = tmp_path / "docker"
    docker.write_text(DOCKER % (pushed, digest))
    docker.chmod(0o755)
    done = subprocess.run(
        [ROOT / "deploy" / "build.sh", "--push", "r.example.org/team", "merge"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert said in done.stderr
    shown = done.stdout.splitlines()
    assert [line.partition("@")[2] for line in shown] == ([digest] if code == 0 else [])


def test_pushing_needs_a_registry() -> None:
    done = subprocess.run([ROOT / "deploy" / "build.sh", "--push"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--push needs a registry: deploy/build.sh --push registry.example.org/team" in done.stderr
