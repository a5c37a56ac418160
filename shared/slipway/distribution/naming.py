"""Name the distribution that installs this package, its version, and the command that installs more of it.

The import name and the command are ``slipway``. The distribution has another name, because the package index has a
``slipway`` of other authors.
"""

from __future__ import annotations

from slipway.distribution.installed import installed_entry_points, installed_version

DISTRIBUTION = "slipway-ml"


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
