"""Generate the Python code of every .proto file and the OpenAPI document into ``slipway_protos``, and check the files with buf.

Usage: ``python protos/generate.py [--check | --release]``. With ``--check`` nothing is written: the committed code must be current,
``buf lint`` and ``buf build`` must pass, and no client of the last release may break. ``--release`` records the sources as released.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc_tools
from google.rpc import status_pb2

ROOT = Path(__file__).parent
PACKAGE = ROOT / "slipway_protos"
RELEASED = ROOT / "released.binpb"
"""Descriptors of the last release, which later sources must not break."""

_BREAKING = '{"version": "v2", "breaking": {"use": ["WIRE_JSON"]}}'
# Folder of sources and the package its code goes to; the first is ours, the other KEDA's.
OPENAPI = "v1/openapi.json"
FOLDERS = {"slipway/v1": "v1", "externalscaler": "externalscaler"}


def protoc(*arguments: str) -> None:
    """Run the protobuf compiler over every source, with the imports that Google's packages bring."""
    sources = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("*.proto"))
    google = Path(status_pb2.__file__).parents[2]
    include = Path(grpc_tools.__file__).parent / "_proto"
    command = [sys.executable, "-P", "-m", "grpc_tools.protoc", f"-I{ROOT}", f"-I{include}", f"-I{google}"]
    subprocess.run([*command, *arguments, *sources], check=True)


def generate(target: Path) -> None:
    """Write messages, type stubs and services of each folder as a package in ``target``.

    The compiler names modules after the folder of the source, such as ``slipway/v1``. The package ``slipway`` is the product's
    own, so the generated modules move to a package of another name and import each other relatively.
    """
    with tempfile.TemporaryDirectory() as scratch:
        protoc(f"--python_out={scratch}", f"--pyi_out={scratch}", f"--grpc_python_out={scratch}")
        for folder, package in FOLDERS.items():
            name = folder.replace("/", ".")
            (target / package).mkdir(parents=True, exist_ok=True)
            title = f'"""Messages and services of {name}. Generated; do not edit."""\n'
            (target / package / "__init__.py").write_text(title)
            for path in sorted((Path(scratch) / folder).iterdir()):
                pattern = rf"^from {re.escape(name)} import "
                text = re.sub(pattern, "from . import ", path.read_text(), flags=re.MULTILINE)
                (target / package / path.name).write_text(text)
    describe(target / OPENAPI)


def describe(document: Path) -> None:
    """Write the OpenAPI document of the calls over HTTP."""
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch) / "image.binpb"
        protoc(f"--descriptor_set_out={image}", "--include_imports", "--include_source_info")
        subprocess.run([sys.executable, str(ROOT / "openapi.py"), str(image), str(document)], check=True)


def lint() -> None:
    """Check with buf the names, numbering and layout of the sources, that they build as published, and that they break no client."""
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch) / "image.binpb"
        protoc(f"--descriptor_set_out={image}", "--include_imports", "--include_source_info")
        paths = [
            argument
            for path in sorted((ROOT / "slipway").rglob("*.proto"))
            for argument in ("--path", str(path.relative_to(ROOT)))
        ]
        buf("lint", str(image), "--config", str(ROOT.parent / "buf.yaml"), *paths)
        buf("build", str(ROOT.parent), "-o", f"{scratch}/published.binpb")
        breaking(image)


def breaking(image: Path) -> None:
    """Check with buf that sources, given as descriptors, break no client of the last release.

    Raises:
        subprocess.CalledProcessError: They do.
    """
    buf("breaking", str(image), "--against", str(RELEASED), "--config", _BREAKING)


def buf(*arguments: str) -> None:
    """Run buf."""
    program = shutil.which("buf", path=str(Path(sys.executable).parent)) or "buf"
    subprocess.run([program, *arguments], check=True)


def is_current() -> bool:
    """Whether the committed code is what the sources give now."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        return all(_same(Path(scratch) / package, PACKAGE / package) for package in FOLDERS.values())


def _same(fresh: Path, committed: Path) -> bool:
    names = sorted(path.name for path in fresh.iterdir())
    if not committed.is_dir() or names != sorted(path.name for path in committed.iterdir() if path.is_file()):
        return False
    return not any(filecmp.cmpfiles(fresh, committed, names, shallow=False)[1:])


def main() -> int:
    """Generate, or check with ``--check``; the exit code is 1 when the committed code is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the committed code is out of date")
    parser.add_argument("--release", action="store_true", help="record the sources as those of a release")
    arguments = parser.parse_args()
    if arguments.release:
        protoc(f"--descriptor_set_out={RELEASED}", "--include_imports")
    if not arguments.check:
        generate(PACKAGE)
    lint()
    if not is_current():
        print("protos/slipway_protos is out of date: run make protos", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
