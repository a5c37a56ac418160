#!/usr/bin/env python3
"""Build what a release consists of, and sign it: ``deploy/release/make_release.py [--out dist] [--only NAME …] [--key KEY.pem] [--wheels DIR] [--trial]``.

Everything is made of the commit that has the tag ``vVERSION``, in a copy of it; ``--trial`` takes any commit. Parts:

- ``sdist`` and ``wheels``: one wheel for each platform whose kernels can be compiled here (the others by Zig's C compiler, if ``ziglang`` is
  installed), and one for any platform, without kernels;
- ``sbom``: what ``slipway-ml[all]`` installs, in CycloneDX's form;
- ``manifests`` and ``chart``: for Kubernetes; ``docs``: the site, if ``make docs`` has built it;
- ``images``: with docker, podman or buildah, only if they are named by ``--only``.

``SHA256SUMS`` covers all of it, and with a key (EC, PEM) ``SIGNATURE`` does, in the form of OpenSSF's model-signing. What cannot be made
here is named at the end, with the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# Python leaves the script's own folder out with -P.
sys.path.insert(0, str(Path(__file__).parent))
from set_version import CHANGELOG, ROOT, ReleaseError, changes, current_version, find_others

SUMS, SIGNATURE = "SHA256SUMS", "SIGNATURE"
FOREIGN: Mapping[str, str] = {"linux-aarch64": "aarch64-linux-gnu.2.17", "macosx-11.0-arm64": "aarch64-macos.11.0"}
"""Platforms as wheels call them, and as Zig does; the numbers are the oldest C library and macOS that will do."""
PASSWORD = "SLIPWAY_RELEASE_PASSWORD"  # noqa: S105 -- the variable's name
_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
_CHART = Path("k8s/helm/slipway")
_SITE = Path(".site/html")


class Missing(Exception):  # noqa: N818 -- no error: a release without this part is one
    """Why a part cannot be made here."""


@dataclass(frozen=True)
class Release:
    """A release that is being made.

    Attributes:
        version: Its version.
        source: A copy of the commit's files.
        out: Where its files go.
        epoch: Time of the commit, in seconds: what is made twice is the same.
        wheels: A folder of wheels with kernels that were made elsewhere, in place of those that can be made here.
    """

    version: str
    source: Path
    out: Path
    epoch: str
    wheels: Path | None = None

    def run(self, *words: str | Path, **environment: str) -> str:
        """Run a program in the copy; return what it prints.

        Raises:
            ReleaseError: It failed; the message ends with its last words.
        """
        plain = {name: value for name, value in os.environ.items() if name != "UV_TORCH_BACKEND"}
        done = subprocess.run(
            list(map(str, words)),
            cwd=self.source,
            env={**plain, "PATH": _PATH, "SOURCE_DATE_EPOCH": self.epoch, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ReleaseError(f"{' '.join(map(str, words[:4]))} failed: {(done.stderr or done.stdout)[-2000:]}")
        return done.stdout

    def python(self, module: str, *words: str | Path, **environment: str) -> str:
        """Run a module that this Python has.

        Raises:
            Missing: It is not installed.
            ReleaseError: As :meth:`run`.
        """
        if importlib.util.find_spec(module) is None:
            raise Missing(f"{module} is not installed: pip install 'slipway-ml[release]'")
        return self.run(sys.executable, "-P", "-m", module, *words, **environment)


def make_sdist(release: Release) -> None:
    """Make the source distribution."""
    release.python("build", "--sdist", "--outdir", release.out, ".")


def make_wheels(release: Release) -> None:
    """Make the wheel of this machine's platform, those of the platforms that Zig compiles for, and the one for any."""
    _make_wheel(release, SLIPWAY_KERNELS="none")
    if release.wheels:
        _take_wheels(release, release.wheels)
        return
    _make_wheel(release)
    if importlib.util.find_spec("ziglang") is None:
        raise Missing(f"no wheels for {', '.join(FOREIGN)}: ziglang is not installed")
    for name, target in FOREIGN.items():
        if name != f"{sys.platform}-{platform.machine()}":
            compiler = f"{sys.executable} -P -m ziglang cc -target {target}"
            _make_wheel(release, CC=compiler, LDSHARED=f"{compiler} -shared", _PYTHON_HOST_PLATFORM=name)


def _take_wheels(release: Release, folder: Path) -> None:
    wheels = sorted(folder.glob("*.whl"))
    others = [wheel.name for wheel in wheels if not wheel.name.startswith(f"slipway_ml-{release.version}-py3-none-")]
    if others or not wheels:
        raise ReleaseError(
            f"{folder.name} has {', '.join(others) or 'no wheels'}: give the wheels of {release.version}"
        )
    for wheel in wheels:
        shutil.copy(wheel, release.out)


def _make_wheel(release: Release, **environment: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.rmtree(release.source / "build", ignore_errors=True)  # objects of another platform
        release.python("build", "--wheel", "--outdir", folder, ".", **environment)
        (wheel,) = Path(folder).iterdir()
        if wheel.stem.endswith("-any") and not environment:
            raise ReleaseError("the kernels were not compiled: install a C compiler")
        if "-linux_" in wheel.name:  # named by the C library that it needs
            release.python("auditwheel", "repair", "--wheel-dir", release.out, wheel)
        else:
            shutil.move(wheel, release.out / wheel.name)


def make_sbom(release: Release) -> None:
    """List what ``slipway-ml[all]`` installs, in the versions of constraints.txt."""
    words = (
        "pip",
        "compile",
        "pyproject.toml",
        "--extra",
        "all",
        "--constraint",
        "constraints.txt",
        "--quiet",
        "--no-header",
    )
    listed = release.source / "all.txt"
    listed.write_text(release.python("uv", *words, "--no-annotate", "--python-version", "3.11"), encoding="utf-8")
    out = release.out / f"slipway-{release.version}.cdx.json"
    release.python(
        "cyclonedx_py", "requirements", listed, "--pyproject", "pyproject.toml", "--output-reproducible", "--of", "JSON", "-o", out
    )  # fmt: skip


def make_manifests(release: Release) -> None:
    """Pack what kustomize takes, without the chart."""
    _pack(release, release.source / "k8s", f"slipway-kubernetes-{release.version}", without="helm")


def make_chart(release: Release) -> None:
    """Pack the chart, as ``helm package`` names it."""
    if not (release.source / _CHART).is_dir():
        raise Missing("there is no chart")
    _pack(release, release.source / _CHART, f"slipway-{release.version}", root="slipway", suffix=".tgz")


def make_docs(release: Release) -> None:
    """Pack the site that ``make docs`` built."""
    if not (ROOT / _SITE / "index.html").is_file():
        raise Missing("the site is not built: make docs")
    _pack(release, ROOT / _SITE, f"slipway-docs-{release.version}")


def make_images(release: Release) -> None:
    """Build the images; they stay with the program that builds them, and ``images.txt`` names them."""
    names = [line.split()[0] for line in release.run("deploy/build.sh", "--list").splitlines()]
    release.run("deploy/build.sh", *(name for name in names if not name.endswith("-cuda")), VERSION=release.version)
    named = "".join(
        f"slipway-{name.removesuffix('-cuda')}:{release.version}\n" for name in names if not name.endswith("-cuda")
    )
    (release.out / "images.txt").write_text(named, encoding="utf-8")


def _pack(
    release: Release, folder: Path, name: str, *, root: str = "", suffix: str = ".tar.gz", without: str = ""
) -> None:
    """Pack a folder so that the same files make the same archive."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if without and entry.name.split("/")[1:2] == [without]:
            return None
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = int(release.epoch), 0, 0, "", ""
        return entry

    bare = release.out / f"{name}.tar"
    with tarfile.open(bare, "w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(folder, root or name, filter=plain)
    release.run("gzip", "--no-name", "--best", bare)
    if suffix != ".tar.gz":
        bare.with_name(f"{bare.name}.gz").rename(release.out / f"{name}{suffix}")


PARTS: Mapping[str, Callable[[Release], None]] = {
    "sdist": make_sdist,
    "wheels": make_wheels,
    "sbom": make_sbom,
    "manifests": make_manifests,
    "chart": make_chart,
    "docs": make_docs,
    "images": make_images,
}
UNASKED = tuple(name for name in PARTS if name != "images")


def find_obstacle(version: str, *, trial: bool) -> str:
    """Return what stands in the way of a release of this commit, and what to do; empty if nothing does."""
    if others := find_others(ROOT):
        return f"{'; '.join(others)}: deploy/release/set_version.py writes them"
    if trial:
        return ""
    if not changes((ROOT / CHANGELOG).read_text(encoding="utf-8"), version):
        return f"{CHANGELOG} has no section of {version}: deploy/release/set_version.py {version} makes it"
    if _git("status", "--porcelain"):
        return "the working copy has changes: commit them"
    if f"v{version}" not in _git("tag", "--points-at", "HEAD").split():
        return f"the commit has no tag v{version}: git tag v{version}, or --trial to see what would be made"
    return ""


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def sign(out: Path, key: Path) -> None:
    """Sign all files of a folder with a private key.

    Raises:
        ReleaseError: The key cannot be used.
    """
    words = ["--private_key", str(key), "--signature", str(out / SIGNATURE)]
    if password := os.environ.get(PASSWORD):
        words += ["--password", password]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "model_signing", "sign", "key", *words, str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ReleaseError(f"{key.name} does not sign: {(done.stderr or done.stdout)[-500:]}")


def build(release: Release, parts: list[str], key: Path | None) -> list[str]:
    """Make the parts, their sums and the signature; return what could not be made, and why."""
    missing = []
    for name in parts:
        print(f"{name} …", file=sys.stderr)
        try:
            PARTS[name](release)
        except Missing as reason:
            missing.append(f"{name}: {reason}")
    files = sorted(path for path in release.out.iterdir() if path.name not in (SUMS, SIGNATURE))
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (release.out / SUMS).write_text(sums, encoding="utf-8")
    if key:
        sign(release.out, key)
    return missing


def release_into(out: Path, parts: list[str], *, key: Path | None, wheels: Path | None, trial: bool) -> list[str]:
    """Make a release in a folder, which is there only if all went well; return what could not be made, and why.

    Raises:
        ReleaseError: Something stands in the way, or failed.
    """
    version = current_version(ROOT)
    if obstacle := find_obstacle(version, trial=trial):
        raise ReleaseError(obstacle)
    if out.exists():
        raise ReleaseError(f"{out.name} is there already: remove it, or name another folder with --out")
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        source, made = Path(folder) / "source", Path(folder) / "made"
        source.mkdir()
        made.mkdir()
        archive = source.with_suffix(".tar")
        _git("archive", "--output", str(archive), "HEAD")
        shutil.unpack_archive(archive, source, filter="data")
        missing = build(Release(version, source, made, _git("log", "-1", "--format=%ct"), wheels), parts, key)
        made.rename(out)
    return missing


def main(words: list[str]) -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder that is made; it must not be there yet")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(UNASKED), help="parts; all but images if not given"
    )
    parser.add_argument("--key", type=Path, help=f"EC private key in PEM form that signs; {PASSWORD} has its password")
    parser.add_argument(
        "--wheels", type=Path, help="folder of wheels with kernels that were made on their own platforms"
    )
    parser.add_argument("--trial", action="store_true", help="take this commit, tagged or not")
    arguments = parser.parse_args(words)
    try:
        out, key, wheels = (path and path.absolute() for path in (arguments.out, arguments.key, arguments.wheels))
        missing = release_into(out, arguments.only, key=key, wheels=wheels, trial=arguments.trial)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(path.name for path in sorted(out.iterdir())))
    print("".join(f"not made: {each}\n" for each in missing), end="", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
