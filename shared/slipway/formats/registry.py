"""Find the installed formats. A distribution provides a format by an entry point in the group ``slipway.formats``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from slipway.errors import ConfigurationError, ModelExportError
from slipway.formats.contract import Format
from slipway.settings.problems import did_you_mean

GROUP = "slipway.formats"


@cache
def formats() -> dict[str, Format[Any]]:
    """Return all installed formats by name, in the order of their rank.

    Raises:
        ConfigurationError: ``FORMAT_INVALID``: a format cannot be used, or none is installed.
    """
    found: dict[str, Format[Any]] = {}
    for entry in entry_points(group=GROUP):
        if entry.name not in found:  # if two distributions have the name, the first on the path wins
            found[entry.name] = _loaded(entry)
    if not found:
        raise ConfigurationError(
            "no format is installed: no distribution has an entry point in the group slipway.formats",
            reason="FORMAT_INVALID",
            remedy="install it again: pip install --force-reinstall slipway",
        )
    _check_variables(found)
    return dict(sorted(found.items(), key=lambda item: (item[1].rank, item[0])))


def load_format(name: str) -> Format[Any]:
    """Return the installed format with this name.

    Raises:
        ConfigurationError: ``FORMAT_UNKNOWN``, or ``FORMAT_INVALID`` as :func:`formats`.
    """
    if name not in formats():
        raise ConfigurationError(
            f"there is no format {name!r}",
            reason="FORMAT_UNKNOWN",
            remedy=did_you_mean(name, tuple(formats())),
            about={"format": name},
        )
    return formats()[name]


def levels() -> tuple[str, ...]:
    """Return the quantization levels of all formats, each once."""
    return tuple(dict.fromkeys(level for each in formats().values() for level in each.levels))


def split_output(name: str) -> tuple[str, str]:
    """Split an output's name into format and level: ``gguf-q8_0`` is ``("gguf", "q8_0")``; the level is empty if unquantized."""
    kind, _, level = name.partition("-")
    return kind, level


def format_of_output(name: str) -> Format[Any] | None:
    """Return the format of the output with this name; None if the format is not installed."""
    return formats().get(split_output(name)[0])


def merged_output() -> str:
    """Return the name of the output that is the merged model itself; empty if no format delivers it."""
    return next((each.name for each in formats().values() if each.is_model), "")


@contextmanager
def translate_format_errors(each: Format[Any]) -> Iterator[None]:
    """Translate any exception of a format's functions into an error that names the format.

    Raises:
        ConfigurationError: ``FORMAT_INVALID``.
    """
    try:
        yield
    except ModelExportError:
        raise
    except Exception as error:  # third-party code may raise anything
        raise ConfigurationError(
            f"the format {each.name} fails: {type(error).__name__}: {error}",
            reason="FORMAT_INVALID",
            remedy="install a version of the format that fits this version of slipway, or disable the format",
            about={"format": each.name},
        ) from error


def _loaded(entry: EntryPoint) -> Format[Any]:
    try:
        found = entry.load()
        if not isinstance(found, Format):
            raise TypeError(f"{entry.value} is not a Format")  # noqa: TRY301 - all faults are reported in one way
        if found.name != entry.name:
            raise ValueError(f"its name is {found.name!r}")  # noqa: TRY301 - as above
        if found.usage is not None and not found.usage.path.is_file():
            raise FileNotFoundError(f"{'/'.join(found.usage.template)} does not exist")  # noqa: TRY301 - as above
    except Exception as error:  # a third-party module may raise anything
        distribution = entry.dist.name if entry.dist is not None else entry.module
        raise ConfigurationError(
            f"the installed format {entry.name!r} cannot be loaded: {type(error).__name__}: {error}",
            reason="FORMAT_INVALID",
            remedy=f"install a version of {distribution} that fits this version of slipway, or uninstall it",
            about={"format": entry.name, "distribution": distribution},
        ) from error
    return found


def _check_variables(found: Mapping[str, Format[Any]]) -> None:
    """Refuse formats that share a variable."""
    owner: dict[str, str] = {}
    for each in found.values():
        for setting in each.settings.model_fields:
            other = owner.setdefault(each.variable(setting), each.name)
            if other != each.name:
                raise ConfigurationError(
                    f"the installed formats {other!r} and {each.name!r} share the variable {each.variable(setting)}",
                    reason="FORMAT_INVALID",
                    remedy="uninstall one of them",
                    about={"format": each.name},
                )
