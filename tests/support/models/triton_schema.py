"""Triton's own description of model configurations."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

_MODULE = "tritonclient/grpc/model_config_pb2.py"


def triton_schema(folder: Path) -> Any:
    """Load the generated module from the wheel of Triton's client, which cannot be installed beside the libraries used here.

    Skip the test if the wheel cannot be downloaded.
    """
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "tritonclient"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.skip(f"pip cannot download tritonclient: {done.stderr.splitlines()[-1:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = archive.extract(_MODULE, folder)
    wheel.unlink()  # 15 MB
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
