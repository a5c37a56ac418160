"""Check whether the libraries of a stage are installed, and say what installs them. Imports nothing heavy, and no format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipway.distribution import WORKER_EXTRA, install_line, stage_extra
from slipway.errors import StageError
from slipway.machine.shortages import with_causes
from slipway.stage import Provider, Stage, library_provider


def is_runnable(stage: Stage[Any], providers: tuple[Provider, ...]) -> bool:
    """Return whether a stage can run with these providers."""
    if not providers:
        return True
    available = [provider.available for provider in providers]
    return any(available) if stage.installation.alternatives else all(available)


def missing_library_error(stage: Stage[Any], error: BaseException) -> StageError | None:
    """Return the ``UNSUPPORTED`` error of a stage that ended because one of its libraries is not installed; None for any other end.

    A stage may do without a library, so only its end shows which one it needs.
    """
    missing = next((link for link in with_causes(error) if isinstance(link, ModuleNotFoundError)), None)
    providers = stage.providers() if missing is not None else ()
    if missing is None or is_runnable(stage, providers):
        return None
    return StageError(
        f"{stage.name} cannot run here: {missing}",
        reason="UNSUPPORTED",
        remedy=install_remedy(stage, providers),
        about={"stage": stage.name, "module": missing.name or ""},
    )


def install_remedy(stage: Stage[Any], providers: tuple[Provider, ...]) -> str:
    """Return what to install for a stage that cannot run with these providers; empty if it can."""
    if is_runnable(stage, providers):
        return ""
    lacking = [provider for provider in providers if not provider.available]
    libraries = [provider.name for provider in lacking if provider == library_provider(provider.name)]
    extra = stage_extra(stage.params.__module__)
    if len(libraries) == len(lacking) and extra != WORKER_EXTRA:
        return (
            f"{', '.join(libraries)} missing: {install_line(extra, own_environment=stage.installation.own_environment)}"
        )
    joint = " or: " if stage.installation.alternatives else "; "
    return joint.join(provider.detail or f"pip install {provider.name}" for provider in lacking)


def with_install_lines(stage: Stage[Any], providers: tuple[Provider, ...], missing: str) -> tuple[Provider, ...]:
    """Return providers whose missing libraries say what installs the stage: its extra, with versions that fit together."""
    if stage_extra(stage.params.__module__) == WORKER_EXTRA:
        return providers  # a stage of another distribution, whose extras are not known
    details = iter([missing])
    return tuple(
        replace(each, detail=next(details, "the same")) if each == library_provider(each.name) and each.detail else each
        for each in providers
    )
