"""Select the environment of a stage's process: only variables that the system and numeric libraries need.

A list of secret variables would never be complete (a URL with a password, ``GH_PAT``, ``PRIVATE_KEY``), so the needed ones are
listed, by whole names. An operator adds names with ``SLIPWAY_STAGE_ENVIRONMENT``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from slipway.errors import ConfigurationError
from slipway.settings.stage_variables import STAGE_VARIABLES

VARIABLE = "SLIPWAY_STAGE_ENVIRONMENT"

_NEEDED = STAGE_VARIABLES | {VARIABLE}  # the list itself is for processes that a stage starts
_SEARCHED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def stage_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of this environment that a stage's process gets.

    No search path in it names the current folder, which may be a checkpoint that contains code: ``.`` and empty parts, which mean
    the current folder too, are left out.

    Raises:
        ConfigurationError: ``SLIPWAY_STAGE_ENVIRONMENT`` is not a list of names.
    """
    added = added_names(environment)
    found = {name: value for name, value in environment.items() if name in _NEEDED or name in added}
    return without_current_folder(found)


def without_current_folder(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process in another folder, without the current folder in any search path."""
    found = dict(environment)
    for name in _SEARCHED:
        folders = [_whole(part) for part in found.pop(name, "").split(os.pathsep) if os.path.normpath(part) != "."]
        if folders:
            found[name] = os.pathsep.join(folders)
    return {**found, "PYTHONSAFEPATH": "1"}


def added_names(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of variables in ``SLIPWAY_STAGE_ENVIRONMENT``.

    Raises:
        ConfigurationError: The variable is not a list of names.
    """
    names = [name.strip() for name in environment.get(VARIABLE, "").split(",") if name.strip()]
    wrong = [name for name in names if not _NAME.fullmatch(name)]
    if wrong:  # the message does not show the part, because it may be a secret value
        raise ConfigurationError(
            f"{VARIABLE}: {len(wrong)} of {len(names)} parts are not names of variables",
            remedy="list only names, such as HTTPS_PROXY,CC; their values are taken from the environment",
            about={"key": VARIABLE},
        )
    return tuple(names)


def _whole(part: str) -> str:
    """Return a folder of a search path for a process in another current folder."""
    return part if part.startswith("$") else str(Path(part).absolute())  # $ORIGIN is the dynamic linker's
