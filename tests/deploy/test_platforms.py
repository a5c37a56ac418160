"""``slipway-ml[all]`` installs where its users are, from wheels: macOS on Apple's processors, Linux on x86-64 and on ARM, Windows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
WHEELS = ("--only-binary", ":all:")
# OpenVINO's wheels for ARM need glibc 2.35, PyTorch's for Apple macOS 14. TensorRT-RTX, for Linux on x86-64, has no wheel: a source
# package that fetches others.
PLATFORMS = {
    "x86_64-manylinux_2_28": (),
    "aarch64-manylinux_2_35": WHEELS,
    "aarch64-apple-darwin": WHEELS,
    "x86_64-pc-windows-msvc": WHEELS,
}
OUT_OF_REACH = ("Failed to fetch", "error sending request")


@pytest.mark.skipif(not UV.exists(), reason="uv asks for versions: pip install uv")
@pytest.mark.parametrize("python", ["3.11", pytest.param("3.13", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "platform",
    [each if each == "aarch64-apple-darwin" else pytest.param(each, marks=pytest.mark.slow) for each in PLATFORMS],
)
def test_everything_can_be_installed(platform: str, python: str, tmp_path: Path) -> None:
    words = [
        "pip",
        "compile",
        ROOT / "pyproject.toml",
        "--extra",
        "all",
        "--constraint",
        ROOT / "constraints.txt",
        "--quiet",
    ]
    words += ["--python-platform", platform, "--python-version", python, *PLATFORMS[platform]]
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    environment.pop("UV_TORCH_BACKEND", None)
    done = subprocess.run([UV, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if done.returncode and any(each in done.stderr for each in OUT_OF_REACH):
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    assert ("tensorrt-rtx==" in done.stdout) == platform.startswith("x86_64-manylinux")
