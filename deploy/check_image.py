"""Runs inside an image, as its user and with its root file system read-only: is it what its Dockerfile promises?

``python -P - EXTRAS < deploy/check_image.py`` in the container; ``EXTRAS`` as in ``build.sh``. Uses only Python's own
library and a light module of Slipway, because nothing else is in every image. Says what is wrong, a line each, and ends with 1; else one line with what it found.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path

from slipway.distribution import DISTRIBUTION

_HOME = Path("/var/lib/slipway")
_ENVIRONMENT = Path("/opt/slipway")
_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
"""What docs/kubernetes.md names for a database with a certificate of a public authority; libpq looks nowhere by itself."""


def main(extras: set[str]) -> int:
    """Check everything; answers the exit code."""
    doctor = subprocess.run(["slipway", "doctor", "--json"], stdout=subprocess.PIPE, check=True)
    runs = sorted(stage["name"] for stage in json.loads(doctor.stdout)["stages"] if stage["available"])
    problems = [
        *_user(),
        *_imports(),
        *_file_system(),
        *_authorities(),
        *_contents(extras),
        *_stages(set(runs), extras),
        *_compiled(extras),
    ]
    for problem in problems:
        print(f"  {problem}")
    if not problems:
        names = ", ".join(runs) or "none"
        print(f"  runs the stages: {names}; {len(_installed())} packages, none that its extras do not ask for")
    return 1 if problems else 0


def _user() -> Iterator[str]:
    if (os.getuid(), os.getgid()) != (10001, 10001):
        yield f"runs as {os.getuid()}:{os.getgid()}, not as 10001:10001"


def _imports() -> Iterator[str]:
    """Python that anybody starts here takes no module from the current folder, which may be a checkpoint."""
    if not os.environ.get("PYTHONSAFEPATH"):
        yield "PYTHONSAFEPATH is not set"


def _file_system() -> Iterator[str]:
    """Nothing can be written but scratch and /tmp, and what cannot be written later is there."""
    for folder in (Path("/"), Path("/opt"), _ENVIRONMENT, Path("/usr")):
        if os.access(folder, os.W_OK):
            yield f"{folder} can be written to"
    for folder in (_HOME, Path("/tmp")):  # noqa: S108 - the folder itself is meant
        if not os.access(folder, os.W_OK):
            yield f"{folder} cannot be written to"
    if not any((_ENVIRONMENT / "lib").glob("python3*/site-packages/slipway/__pycache__/*.pyc")):
        yield "the code is not compiled, and cannot be on a read-only file system"


def _authorities() -> Iterator[str]:
    if not _AUTHORITIES.is_file() or "BEGIN CERTIFICATE" not in _AUTHORITIES.read_text(encoding="utf-8"):
        yield f"{_AUTHORITIES} holds no certificates"


def _contents(extras: set[str]) -> Iterator[str]:
    installed = _installed()
    wanted = _closure(DISTRIBUTION, extras)
    yield from (f"{name} is installed, and none of its extras asks for it" for name in sorted(installed - wanted))


def _compiled(extras: set[str]) -> Iterator[str]:
    """Check that the kernels were compiled: the stages would do without them, but slower."""
    for extra, package in (("merge", "slipway_merge/tensors"), ("quantize", "slipway_quantize/grid")):
        if extra in extras and not any((_ENVIRONMENT / "lib").glob(f"python3*/site-packages/{package}/_kernel*.so")):
            yield f"the kernel of {extra} is not compiled"


def _stages(runs: set[str], extras: set[str]) -> Iterator[str]:
    """Check that doctor says that the image's stage can run."""
    wanted = {extra.replace("-", "_") for extra in extras} - {"coordinator", "s3", "tensorrt"}
    yield from (f"does not run the stage {name}" for name in sorted(wanted - runs))


def _installed() -> set[str]:
    return {_normal(found.name) for found in distributions()}


def _closure(name: str, extras: set[str]) -> set[str]:
    """Name a distribution and all that it requires, also what only other machines need."""
    found: set[str] = set()
    waiting = [(_normal(name), frozenset(map(_normal, extras)))]
    seen = set(waiting)
    while waiting:
        name, chosen = waiting.pop()
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # for another machine, or another Python
            continue
        for line in lines:
            head, _, marker = line.partition(";")
            asked = re.search(r"extra\s*==\s*[\"']([^\"']+)", marker)
            if asked and _normal(asked[1]) not in chosen:
                continue
            match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^]]*)])?", head)
            assert match, line
            wanted = (_normal(match[1]), frozenset(map(_normal, filter(None, (match[2] or "").split(",")))))
            if wanted not in seen:
                seen.add(wanted)
                waiting.append(wanted)
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


if __name__ == "__main__":
    sys.exit(main({extra for extra in sys.argv[1].split(",") if extra}))
