"""Wheels: any Python of a platform takes the one with kernels, any platform the one without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from slipway.machine.compiled.library import load_library
from support.commands.light_install import ROOT, SOURCES

FOLDERS = ("slipway_merge/tensors", "slipway_quantize/grid")
PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")


def made(folder: Path, **environment: str) -> zipfile.ZipFile:
    """Build a wheel of a copy of the sources, with the setuptools of this environment."""
    if Version(metadata.version("setuptools")) < Version("77"):
        pytest.skip("setuptools is older than pyproject.toml asks for")
    copy, out = folder / "source", folder / "wheels"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", out]
    command = [sys.executable, "-P", "-m", "pip", *build, copy]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = out.iterdir()
    return zipfile.ZipFile(path)


def tag(wheel: zipfile.ZipFile) -> str:
    return Path(wheel.filename or "").stem.partition("-py3-")[2]


def data_files() -> set[str]:
    """The files beside the code that packages read: pages, templates, tables."""
    kinds = {".j2", ".css", ".js", ".yaml"}
    places = [ROOT / "shared", *(ROOT / "services").iterdir()]
    found = ((place, path) for place in places if place.is_dir() for path in place.glob("slipway*/**/*"))
    return {path.relative_to(place).as_posix() for place, path in found if path.suffix in kinds}


def kernels(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if Path(name).name.startswith("_kernel")]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_kernels_name_the_platform_and_no_python(tmp_path: Path) -> None:
    wheel = made(tmp_path)
    assert tag(wheel) == f"none-{PLATFORM}"
    assert kernels(wheel) == [f"{folder}/_kernel.so" for folder in FOLDERS]
    wheel.extractall(tmp_path / "installed")
    assert all(load_library(tmp_path / "installed" / folder) for folder in FOLDERS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [{"SLIPWAY_KERNELS": "none"}, {"CC": "/nonexistent/cc"}], ids=["asked", "no compiler"]
)
def test_without_kernels_a_wheel_is_for_any_platform(tmp_path: Path, environment: dict[str, str]) -> None:
    wheel = made(tmp_path, **environment)
    assert tag(wheel) == "none-any"
    assert kernels(wheel) == []
    assert data_files() - set(wheel.namelist()) == set()


def test_a_kernel_of_another_machine_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "_kernel.so").write_bytes(b"of another kind of processor")
    assert load_library(tmp_path) is None


def test_a_kernel_of_an_earlier_installation_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / f"_kernel{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"another one")
    assert load_library(tmp_path) is None
