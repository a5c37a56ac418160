"""Look up what is installed: a group's entry points, versions, and the distribution and command that install Slipway.

The standard library reads the metadata of every distribution at each call, which takes tens of milliseconds. Here each answer
is kept until a folder of the import path changes, as it does when something is installed or removed.

The import name and the command are ``slipway``. The distribution has another name, because the package index has a ``slipway``
of other authors.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import lru_cache
from importlib import metadata

_OTHER_BUILDS = {"onnxruntime": ("onnxruntime-gpu",)}
"""Distributions with the same module for other machines, by name."""

_Folders = tuple[tuple[str, int], ...]

DISTRIBUTION = "slipway-ml"


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
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


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
