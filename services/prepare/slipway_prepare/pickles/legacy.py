"""Write a file of weights in torch's format from before 1.6 in the format of today, in a process whose memory and time are bounded.

The older format is a row of pickles with the tensors' bytes behind them. It cannot be mapped, and its pickles cannot be checked before
torch reads them, so it is read whole where that can do no harm.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipway.machine.python_process import python_module
from slipway_prepare.faults import disk_full, invalid, runs_code, unsafe

_MAGIC = re.compile(rb"\x80[\x02\x03]\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.")
"""What such a file begins with: torch's magic number, pickled."""
_HEAD = 512
_TAR = (257, b"ustar")
_SECONDS, _BYTES_PER_SECOND = 120.0, 5e6
"""Time until the process is ended: far more than a slow disk needs."""


def is_legacy(path: Path) -> bool:
    """Return whether a file has torch's format from before 1.6.

    Raises:
        CheckpointValidationError: ``UNSAFE_PICKLE``: it has the still older one, which torch does not read without running code.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    place, mark = _TAR
    if head[place:].startswith(mark):
        raise unsafe(path, "is a tar archive, as torch wrote before version 0.1.10, which is read only by running code")
    return _MAGIC.match(head) is not None


@contextmanager
def as_archive(path: Path, scratch: Path) -> Iterator[Path]:
    """Yield a file in today's format with the content of an older one; remove it afterwards.

    Args:
        path: The older file.
        scratch: Folder for the newer one.

    Raises:
        CheckpointValidationError: ``UNSAFE_PICKLE``: it would run code, or takes more memory or time than its size allows;
            ``BASE_MODEL_INVALID``: it is damaged; ``DISK_FULL``.
    """
    with tempfile.TemporaryDirectory(dir=scratch, prefix="pickle-") as folder:
        target = Path(folder) / "weights.bin"
        failure = _rewrite(path, target)
        if failure is not None:
            raise failure
        yield target


def _rewrite(path: Path, target: Path) -> Exception | None:
    command = python_module("slipway_prepare.pickles.rewriting", str(path.absolute()), str(target.absolute()))
    patience = _SECONDS + path.stat().st_size / _BYTES_PER_SECOND
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience, cwd=target.parent, check=False
        )
    except subprocess.TimeoutExpired:
        return unsafe(path, f"takes more than {patience:.0f} seconds to read")
    try:
        said = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = {"fault": "ended"}
    return _failure(path, fault=str(said.get("fault", "")), detail=str(said.get("detail", "")), code=done.returncode)


def _failure(path: Path, *, fault: str, detail: str, code: int) -> Exception | None:
    match fault:
        case "":
            return None
        case "code":
            return runs_code(path, detail)
        case "damaged":
            return invalid(f"has an unreadable file {path.name} ({detail})", file=path)
        case "disk":
            return disk_full(path)
        case "memory":
            return unsafe(path, "needs far more memory than its size")
    # A signal of the kernel: the time of the process is over, or its memory.
    return unsafe(path, f"needs more time or memory than its size allows (its process ended with {code})")
