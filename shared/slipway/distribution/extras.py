"""Check whether the optional parts of the distribution are installed, and say what to install if not.

``pip install slipway-ml`` installs the client and the commands that talk to a coordinator. An extra, such as
``slipway-ml[coordinator]``, installs the libraries of another part.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from slipway.distribution.installed import install_command
from slipway.errors import ServiceError

WORKER = "worker"
_SERVER = ("grpc_health", "grpc_reflection", "prometheus_client")
_TELEMETRY = ("opentelemetry.exporter", "opentelemetry.sdk")

MODULES: Mapping[str, tuple[str, ...]] = {
    WORKER: (*_SERVER, *_TELEMETRY, "psutil"),
    "coordinator": ("dbos", *_SERVER, *_TELEMETRY, "psycopg", "sqlalchemy"),
    "report": ("jinja2",),
    "s3": ("minio",),
    "telemetry": _TELEMETRY,
    "sample": ("accelerate", "gguf", "peft", "psutil", "torch", "transformers"),
}
"""Modules that each extra installs. The extras of stages are not listed, because each stage names its own libraries."""


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
    return tuple(module for module in MODULES[extra] if not _is_installed(module))


def require(*extras: str, what: str, install: str = "", otherwise: str = "") -> None:
    """Raise an error that says what to install, unless all modules of these extras are installed.

    Args:
        extras: Keys of :data:`MODULES`.
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
    for extra, modules in MODULES.items():
        if name.partition(".")[0] in {module.partition(".")[0] for module in modules}:
            return _not_installed_error([name], what="", install=extra, otherwise="")
    return None


def stage_extra(module: str) -> str:
    """Return the extra with a stage's libraries and the worker, given the module that defines the stage.

    For a stage of another distribution, this is the worker's extra.
    """
    package = module.partition(".")[0]
    return package.removeprefix("slipway_") if package.startswith("slipway_") else WORKER


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
