"""Formats by name. A distribution brings a format by an entry point in the group ``slipway.formats``."""

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
    """Return all installed formats by name, in their order.

    Raises:
        ConfigurationError: reason ``FORMAT_INVALID``: one of them cannot be used, or there is none.
    """
    found: dict[str, Format[Any]] = {}
    for entry in entry_points(group=GROUP):
        if entry.name not in found:  # of two distributions, the first on the path
            found[entry.name] = _loaded(entry)
    if not found:
        raise ConfigurationError(
            "no format is installed: the installed slipway has none under slipway.formats",
            reason="FORMAT_INVALID",
            remedy="install it again: pip install --force-reinstall slipway",
        )
    _check_variables(found)
    return dict(sorted(found.items(), key=lambda item: (item[1].rank, item[0])))


def load_format(name: str) -> Format[Any]:
    """Return the installed format of a name.

    Raises:
        ConfigurationError: reason ``FORMAT_UNKNOWN``, or ``FORMAT_INVALID`` as :func:`formats`.
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
    """Split an output's name into format and level: ``gguf-q8_0`` is ``("gguf", "q8_0")``; unquantized has no level."""
    kind, _, level = name.partition("-")
    return kind, level


def format_of_output(name: str) -> Format[Any] | None:
    """Return the installed format of an output's name; None where it is not installed here."""
    return formats().get(split_output(name)[0])


def merged_output() -> str:
    """Return the name of the output that is the merged model itself; empty where no format delivers it."""
    return next((each.name for each in formats().values() if each.is_model), "")


@contextmanager
def asking(each: Format[Any]) -> Iterator[None]:
    """Call a format's functions in a block: turn whatever they raise into an error with its name.

    Raises:
        ConfigurationError: reason ``FORMAT_INVALID``.
    """
    try:
        yield
    except ModelExportError:
        raise
    except Exception as error:  # code of others may raise anything
        raise ConfigurationError(
            f"the format {each.name} fails: {type(error).__name__}: {error}",
            reason="FORMAT_INVALID",
            remedy="install a version of it that fits this one of slipway, or leave the format out",
            about={"format": each.name},
        ) from error


def _loaded(entry: EntryPoint) -> Format[Any]:
    try:
        found = entry.load()
        if not isinstance(found, Format):
            raise TypeError(f"{entry.value} is not a Format")  # noqa: TRY301 - one failure, however it shows
        if found.name != entry.name:
            raise ValueError(f"its name is {found.name!r}")  # noqa: TRY301 - as above
        if found.usage is not None and not found.usage.path.is_file():
            raise FileNotFoundError(f"there is no {'/'.join(found.usage.template)}")  # noqa: TRY301 - as above
    except Exception as error:  # a module of others may raise anything
        bringer = entry.dist.name if entry.dist is not None else entry.module
        raise ConfigurationError(
            f"the installed format {entry.name!r} cannot be loaded: {type(error).__name__}: {error}",
            reason="FORMAT_INVALID",
            remedy=f"install {bringer} again in a version that fits, or uninstall it",
            about={"format": entry.name, "distribution": bringer},
        ) from error
    return found


def _check_variables(found: Mapping[str, Format[Any]]) -> None:
    """Refuse formats that would share a variable."""
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
