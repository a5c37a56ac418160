"""What is installed: entry points, versions and extras, and the commands that install what is missing.

The standard library reads the metadata of every distribution at each call, which takes tens of milliseconds. Here entry points and
versions are kept until a folder of the import path changes, as it does when something is installed or removed.

The import name and the command are ``slipway``. The distribution has another name, because the package index has a ``slipway``
of other authors.

``pip install slipway-ml`` installs the client and the commands that talk to a coordinator. An extra, such as
``slipway-ml[coordinator]``, installs the libraries of another part.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec

from slipway.errors import ServiceError

_OTHER_BUILDS = {"onnxruntime": ("onnxruntime-gpu",)}
"""Distributions with the same module for other machines, by name."""

_Folders = tuple[tuple[str, int], ...]
_VERSION = re.compile(r"^Version:[ \t]*(\S+)", re.MULTILINE)

DISTRIBUTION = "slipway-ml"

WORKER_EXTRA = "worker"
_SERVER = ("grpc_health", "grpc_reflection", "prometheus_client")
_TELEMETRY = ("opentelemetry.exporter", "opentelemetry.proto", "opentelemetry.sdk")

EXTRA_MODULES: Mapping[str, tuple[str, ...]] = {
    WORKER_EXTRA: (*_SERVER, *_TELEMETRY, "psutil"),
    "coordinator": ("dbos", *_SERVER, *_TELEMETRY, "psycopg", "sqlalchemy", "standardwebhooks", "uvicorn"),
    "oidc": ("joserfc",),
    "kubernetes": ("lightkube",),
    "report": ("jinja2",),
    "mlflow": ("mlflow",),
    "publish": ("OpenSSL", "certifi", "model_signing", "urllib3"),
    "ray": ("ray",),
    "s3": ("minio",),
    "telemetry": _TELEMETRY,
    "ui": ("jinja2", "starlette", "uvicorn"),
    "sample": ("accelerate", "gguf", "peft", "psutil", "torch", "transformers"),
}
"""Modules that each extra installs. The extras of stages are not listed, because each stage names its own libraries."""


def installed_entry_points(group: str) -> metadata.EntryPoints:
    """Return the entry points of a group in all installed distributions."""
    return _entry_points(group, _import_path())


def installed_version(distribution: str, *, alike: bool = True) -> str:
    """Return the version of an installed distribution, or an empty string.

    Args:
        distribution: Its name.
        alike: Whether another build of the same module will do.
    """
    path = _import_path()
    names = (distribution, *(_OTHER_BUILDS.get(distribution, ()) if alike else ()))
    return next(filter(None, (_version(name, path) for name in names)), "")


def _import_path() -> _Folders:
    """Return the folders of the import path with the times of their last changes, in nanoseconds."""
    folders = []
    for folder in sys.path:
        with contextlib.suppress(OSError):
            folders.append((folder, os.stat(folder or ".").st_mtime_ns))  # noqa: PTH116 - asked hundreds of times, and a Path costs more
    return tuple(folders)


@lru_cache(maxsize=16)
def _entry_points(group: str, _path: _Folders) -> metadata.EntryPoints:
    return metadata.entry_points(group=group)


@lru_cache(maxsize=512)
def _version(distribution: str, _path: _Folders) -> str:
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return ""
    headers = (found.read_text("METADATA") or found.read_text("PKG-INFO") or "").partition("\n\n")[0]
    version = _VERSION.search(headers)  # parsing all of it as a message takes ten times as long
    return version[1] if version else found.version


def install_command(*extras: str, options: str = "") -> str:
    """Return the command that installs this distribution with some extras.

    Args:
        extras: Names of extras; none for the client alone.
        options: Options of ``pip install``.
    """
    wanted = f"'{DISTRIBUTION}[{','.join(extras)}]'" if extras else DISTRIBUTION
    return " ".join(filter(None, ("pip install", options, wanted)))


def own_version() -> str:
    """Return the version of this distribution.

    A working copy may be installed under an earlier name: then return the version of the distribution that provides its
    stages. Return an empty string if nothing does.
    """
    if version := installed_version(DISTRIBUTION):
        return version
    merging = (entry for entry in installed_entry_points("slipway.stages") if entry.module.startswith("slipway_merge."))
    return next((entry.dist.version for entry in merging if entry.dist is not None), "")


def install_line(extra: str, *, own_environment: str) -> str:
    """Return the command that installs the libraries of a stage; in an environment of their own where there is a reason for one."""
    if not own_environment:
        return install_command(extra)
    folder = f"slipway-{extra}"
    command = install_command("all", extra).replace("pip", f"{folder}/bin/pip", 1)
    why = f"an environment of its own, as {own_environment}"
    return f"python3 -P -m venv {folder} && {command}, and export with {folder}/bin/slipway ({why})"


def missing_modules(extra: str) -> tuple[str, ...]:
    """Return the modules of an extra that are not installed, without importing them."""
    return tuple(module for module in EXTRA_MODULES[extra] if not _is_installed(module))


def require(*extras: str, what: str, install: str = "", otherwise: str = "") -> None:
    """Raise an error that says what to install, unless all modules of these extras are installed.

    Args:
        extras: Keys of :data:`EXTRA_MODULES`.
        what: The command that needs them, such as ``slipway coordinator``.
        install: The extra to recommend; by default ``extras`` themselves.
        otherwise: What the user can do instead of installing it.

    Raises:
        ServiceError: ``UNSUPPORTED``.
    """
    lacking = list(dict.fromkeys(module for extra in extras for module in missing_modules(extra)))
    if lacking:
        raise _not_installed_error(lacking, what=what, install=install or ",".join(extras), otherwise=otherwise)


def translate_import_error(error: ModuleNotFoundError) -> ServiceError | None:
    """Translate the failed import of a module of an extra; return None for any other module."""
    name = error.name or ""
    for extra, modules in EXTRA_MODULES.items():
        if name.partition(".")[0] in {module.partition(".")[0] for module in modules}:
            return _not_installed_error([name], what="", install=extra, otherwise="")
    return None


def stage_extra(module: str) -> str:
    """Return the extra with a stage's libraries and the worker, given the module that defines the stage.

    For a stage of another distribution, this is the worker's extra.
    """
    package = module.partition(".")[0]
    return package.removeprefix("slipway_") if package.startswith("slipway_") else WORKER_EXTRA


def _not_installed_error(modules: list[str], *, what: str, install: str, otherwise: str) -> ServiceError:
    first, others = modules[:2], len(modules) - 2
    shown = " and ".join(first) if others <= 0 else f"{', '.join(first)} and {others} more"
    verb = "is" if len(modules) == 1 else "are"
    return ServiceError(
        f"{shown} {verb} not installed" + (f", which {what} needs" if what else ""),
        reason="UNSUPPORTED",
        remedy=install_command(install) + (f", or {otherwise}" if otherwise else ""),
        about={"modules": ", ".join(modules), "extra": install},
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not installed
        return False
