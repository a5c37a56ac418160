"""The lock of versions: what uv resolves is what is committed, and nothing is overwritten by mistake."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESOLVED = "onnx==1.21.0\nnvidia-cublas==13.1\ntriton==3.7\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "lock.sh", tmp_path / "deploy")
    (tmp_path / "constraints.txt").write_text("# before\n")
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


def lock(tree: Path, uv: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a program in place of uv: where there is no index, what uv says must not decide."""
    program = tree / "uv"
    program.write_text(
        f"#!/bin/bash\ntarget=${{@: -1}}\nfor word; do [[ $last == --output-file ]] && target=$word; last=$word; done\n{uv}\n"
    )
    program.chmod(0o755)
    command = [tree / "deploy" / "lock.sh", *words]
    return subprocess.run(command, env={"UV": str(program), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True)


def test_it_leaves_out_what_only_cuda_needs(tree: Path) -> None:
    assert lock(tree, f'printf "{RESOLVED}" >"$target"').returncode == 0
    lines = (tree / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["onnx==1.21.0"]
    assert lock(tree, f'printf "{RESOLVED}" >"$target"', "--check").returncode == 0


def test_what_is_not_current_is_shown_and_stays(tree: Path) -> None:
    done = lock(tree, f'printf "{RESOLVED}" >"$target"', "--check")
    assert done.returncode == 1
    assert "+onnx==1.21.0" in done.stdout
    assert "run make lock" in done.stderr
    assert (tree / "constraints.txt").read_text() == "# before\n"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("error sending request for url", 0),
        ("Failed to fetch: https://…", 0),
        ("No solution found", 1),
        ("TOML parse error at line 3", 1),
    ],
)
def test_only_an_index_that_is_out_of_reach_is_no_failure(tree: Path, said: str, code: int) -> None:
    done = lock(tree, f"echo {said!r} >&2; exit 2", "--check")
    assert done.returncode == code
    assert ("was not checked" in done.stderr) == (code == 0)
    assert lock(tree, f"echo {said!r} >&2; exit 2").returncode == 1
    assert (tree / "constraints.txt").read_text() == "# before\n"


def test_an_unknown_option_changes_nothing(tree: Path) -> None:
    done = lock(tree, f'printf "{RESOLVED}" >"$target"', "--chek")
    assert done.returncode == 2
    assert "there is no option --chek" in done.stderr
    assert (tree / "constraints.txt").read_text() == "# before\n"
