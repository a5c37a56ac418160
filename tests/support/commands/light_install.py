"""Run ``slipway`` as after ``pip install slipway-ml``: without the modules that only extras install."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from slipway.distribution import DISTRIBUTION
from support.commands.cli import SLIPWAY, Done

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = ("pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE", "protos", "shared", "services")

# Python imports this module by itself, before everything else in each process.
_HIDING = """
import re
import sys

HIDDEN = {hidden!r}
LIGHT = {light!r}


class Hiding:
    # A finder that finds neither the hidden modules nor their distributions.

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

    def find_distributions(self, context):
        name = re.sub(r"[-_.]+", "-", context.name or "").lower()
        find = getattr(self.finder, "find_distributions", None)
        return () if find is None or (name and name not in LIGHT) else find(context)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""


@dataclass(frozen=True)
class LightInstall:
    """A command without extras."""

    program: str
    home: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str | Path) -> Done:
        """Run the command to its end."""
        done = subprocess.run(
            [self.program, *map(str, words)],
            env={**self.environment, "SLIPWAY_HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def cpu_seconds(self, *words: str) -> float:
        """Return the processor time that a command takes."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert self.run(*words).code == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def light_distributions(*extras: str) -> set[str]:
    """Return the distributions that ``pip install slipway-ml[EXTRAS]`` brings, by their normal names."""
    found: set[tuple[str, frozenset[str]]] = set()
    own = PROJECT["dependencies"] + [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    waiting = [(Requirement(line), frozenset[str]()) for line in own]
    while waiting:
        requirement, of = waiting.pop()
        name, wanted = normal(requirement.name), frozenset(requirement.extras)
        applies = requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in ("", *of))
        if not applies or (name, wanted) in found:
            continue
        found.add((name, wanted))
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # for another platform
            continue
        if name == DISTRIBUTION:
            lines = [line for extra in sorted(wanted) for line in PROJECT["optional-dependencies"][extra]]
        waiting += [(Requirement(line), wanted) for line in lines]
    return {name for name, _ in found}


def hidden_modules(*extras: str) -> list[str]:
    """Return the modules of installed distributions that ``pip install slipway-ml[EXTRAS]`` does not bring."""
    light = light_distributions(*extras) | {DISTRIBUTION}
    modules = _installed_modules()
    return sorted(
        module
        for module, distributions in modules.items()
        if not light & set(map(normal, distributions)) and not module.startswith("slipway") and module.isidentifier()
    )


def with_extras_hidden(folder: Path, *extras: str) -> LightInstall:
    """Return the installed command with all modules hidden that only other extras install.

    Args:
        folder: Folder for its home and for the module that hides the others.
        extras: Extras that are installed.
    """
    light = light_distributions(*extras) | {DISTRIBUTION}
    (folder / "sitecustomize.py").write_text(_HIDING.format(hidden=set(hidden_modules(*extras)), light=light))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return LightInstall(SLIPWAY, folder / "home", {**os.environ, "PYTHONPATH": path})


def freshly_installed(folder: Path) -> LightInstall:
    """Make a virtual environment and install a copy of this repository into it, without extras.

    Skips the test where the package index does not answer.
    """
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment, copy = folder / "environment", folder / "source"
    subprocess.run([sys.executable, "-P", "-m", "venv", environment], env=plain, check=True)
    pip = [str(environment / "bin" / "python"), "-P", "-m", "pip", "--disable-pip-version-check"]
    probe = [*pip, "download", "--quiet", "--no-deps", "--retries", "0", "--dest", str(folder / "probe"), "typing-extensions"]  # fmt: skip
    if subprocess.run(probe, env=plain, capture_output=True, timeout=120).returncode:
        pytest.skip("the package index does not answer")
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
            )
        else:
            shutil.copy(ROOT / name, copy)
    install = [*pip, "install", "--quiet", "-c", str(copy / "constraints.txt"), str(copy)]
    done = subprocess.run(install, env=plain, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return LightInstall(str(environment / "bin" / "slipway"), folder / "home", plain)


@cache
def _installed_modules() -> dict[str, list[str]]:
    """Return the distributions of every module. Each look reads the lists of files of all of them, which takes a second."""
    return dict(packages_distributions())


def modules_of(requirement: str) -> Iterator[str]:
    """Yield the top-level modules of an installed requirement."""
    wanted = normal(Requirement(requirement).name)
    for module, distributions in _installed_modules().items():
        if wanted in map(normal, distributions):
            yield module


def normal(name: str) -> str:
    """Return the name of a distribution as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
