"""Environments with the package of a pipeline platform, whose libraries do not go with ours, and programs that run in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import SUPPORT
from support.harness.made_once import made_once

EXAMPLES = SUPPORT.parents[1] / "examples" / "pipelines"
DRIVERS = SUPPORT / "platforms"
_UV = str(Path(sys.executable).with_name("uv"))
_INSTALL_SECONDS = 500


class Platform:
    """A platform's environment.

    Args:
        name: Folder of its example.
        python: The environment's interpreter.
        folder: Where its programs run.
    """

    def __init__(self, name: str, python: Path, folder: Path) -> None:
        self.name, self.python, self.folder = name, python, folder
        self.variables: dict[str, str] = {}

    def start(self, *words: str | Path, **environment: str) -> subprocess.Popen[str]:
        """Start a program of the environment, or with its interpreter a Python file; output and errors are read together."""
        first, *others = map(str, words)
        command = [str(self.python), "-P", first] if first.endswith(".py") else [str(self.python.with_name(first))]
        path = os.pathsep.join([str(EXAMPLES), str(EXAMPLES / self.name)])
        # Of the test's own variables none but those that every program has: Slipway is not on this path.
        kept = {key: os.environ[key] for key in ("PATH", "LANG", "TMPDIR") if key in os.environ}
        kept["HOME"] = str(self.folder)  # platforms keep settings there
        marks = {key: value for key, value in os.environ.items() if key.startswith(("STARTED_BY", "PYTEST_CURRENT"))}
        return subprocess.Popen(
            [*command, *others],
            env={**kept, **marks, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **self.variables, **environment},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str | Path, timeout: float = 480, **environment: str) -> tuple[int, str]:
        """Run a program to its end; return exit code and output."""
        return finish(self.start(*words, **environment), timeout=timeout)


def finish(started: subprocess.Popen[str], *, timeout: float = 480) -> tuple[int, str]:
    """Wait for a program; return exit code and output."""
    try:
        output, _ = started.communicate(timeout=timeout)
    except BaseException:
        started.kill()
        started.communicate()
        raise
    return started.returncode, output


def platform(name: str, temporary: pytest.TempPathFactory) -> Platform:
    """Return the environment of a platform: ``SLIPWAY_TEST_ENVIRONMENTS/NAME`` if it is there, else one made for this run of the tests.

    Skips the test where the package index does not answer.
    """
    kept = Path(os.environ.get("SLIPWAY_TEST_ENVIRONMENTS", "/nonexistent")) / name / "bin" / "python"
    if kept.is_file():
        return Platform(name, kept, temporary.mktemp(name))
    with made_once(temporary, f"environment-of-{name}") as folder:
        if not (folder / "complete").exists():
            _install(folder, EXAMPLES / name / "requirements.txt")
            (folder / "complete").touch()
    return Platform(name, folder / "bin" / "python", temporary.mktemp(name))


def _install(folder: Path, requirements: Path) -> None:
    """Make an environment of what a file requires."""
    plain = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    plain |= {"UV_HTTP_TIMEOUT": "30", "UV_NO_PROGRESS": "1"}
    make = [_UV, "venv", "--quiet", "--allow-existing", "--no-project", "--python", sys.executable, str(folder)]
    subprocess.run(make, env=plain, check=True, cwd=folder)
    install = [_UV, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
    done = subprocess.run([*install, "-r", str(requirements)], env=plain, capture_output=True, text=True, cwd=folder, timeout=_INSTALL_SECONDS)  # fmt: skip
    if done.returncode == 0:
        return
    probe = subprocess.run([*install, "--no-cache", "--reinstall", "six"], env=plain, capture_output=True, cwd=folder, timeout=_INSTALL_SECONDS)  # fmt: skip
    if probe.returncode:
        pytest.skip(f"{requirements.parent.name} cannot be installed here: the package index does not answer")
    raise AssertionError(done.stderr)
