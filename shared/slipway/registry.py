"""Find stages by name. A distribution provides a stage by an entry point in the group ``slipway.stages``."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from slipway.distribution import install_command, installed_entry_points
from slipway.errors import ConfigurationError
from slipway.stage import Role, Stage

GROUP = "slipway.stages"
IMPORT = "import"
"""Stage of the worker itself, which imports the sources of exports that only name them; no distribution provides it."""
_OWN = {IMPORT: "slipway.export_sources.import_stage:STAGE"}


def stage_names() -> tuple[str, ...]:
    """Return the names of all installed stages, sorted."""
    return tuple(sorted(installed_entry_points(GROUP).names))


def load_stage(reference: str) -> Stage[Any]:
    """Load a stage by its installed name, or by a reference ``module:ATTRIBUTE``.

    Raises:
        ConfigurationError: ``STAGE_UNKNOWN``.
    """
    module, colon, attribute = _OWN.get(reference, reference).partition(":")
    try:
        if colon:
            stage = getattr(import_module(module), attribute)
        else:
            stage = installed_entry_points(GROUP)[reference].load()
        if isinstance(stage, Stage) and not stage.params.__module__.startswith("slipway"):
            stage.params.model_rebuild()  # fail now, not when a task begins, if a field has an unknown type
    except (Exception, SystemExit) as error:  # a third-party module may raise anything
        why = "" if reference not in stage_names() and not colon else f": {type(error).__name__}: {error}"
        raise ConfigurationError(
            f"there is no stage {reference!r}{why}",
            reason="STAGE_UNKNOWN",
            remedy=f"installed stages are {', '.join(stage_names())}",
            about={"stage": reference},
        ) from error
    if not isinstance(stage, Stage):
        raise ConfigurationError(f"{reference} is not a stage", reason="STAGE_UNKNOWN", about={"stage": reference})
    return stage


@cache
def known_stage(name: str) -> Stage[Any] | None:
    """Return the stage of this name; None if it is not installed here, for example a plug-in of another machine."""
    try:
        return load_stage(name)
    except ConfigurationError:
        return None


@cache
def stage_of(role: Role) -> Stage[Any]:
    """Return the installed stage with a role.

    Raises:
        ConfigurationError: ``STAGE_UNKNOWN``.
    """
    for name in stage_names():
        stage = known_stage(name)
        if stage is not None and stage.role is role:
            return stage
    raise ConfigurationError(
        f"no installed stage has the role {role.name.lower()}",
        reason="STAGE_UNKNOWN",
        remedy=f"install slipway again: {install_command(options='--force-reinstall')}",
        about={"role": role.name.lower()},
    )


def plays(name: str, *roles: Role) -> bool:
    """Return whether the stage of this name has one of these roles."""
    stage = known_stage(name)
    return stage is not None and stage.role in roles
