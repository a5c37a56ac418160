"""Find the installed formats. A distribution provides a format by an entry point in the group ``slipway.formats``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple

from pydantic import ValidationError

from slipway.distribution import DISTRIBUTION, install_command, installed_entry_points
from slipway.errors import ConfigurationError, ModelExportError
from slipway.formats.contract import Format, Runtime
from slipway.settings.problems import did_you_mean
from slipway.settings.sections import EXPORT_VARIABLES
from slipway.texts import one_line

GROUP = "slipway.formats"


class _Candidate(NamedTuple):
    distribution: str
    format: Format[Any]


@dataclass(frozen=True, slots=True)
class RefusedFormat:
    """An installed format that cannot be used. It is refused where it is asked for, and stops nothing else.

    Attributes:
        name: Name of its entry point.
        distribution: Distribution that provides it.
        fault: Why it cannot be used.
    """

    name: str
    distribution: str
    fault: str

    def error(self) -> ConfigurationError:
        """Return the error for a request for the format."""
        return ConfigurationError(
            f"the installed format {self.name!r} of {self.distribution} cannot be used: {self.fault}",
            reason="FORMAT_INVALID",
            remedy=f"install a version of {self.distribution} that fits this version of slipway, or uninstall it",
            about={"format": self.name, "distribution": self.distribution},
        )


@cache
def _installed() -> tuple[dict[str, Format[Any]], tuple[RefusedFormat, ...]]:
    """Load all installed formats; return the usable ones by name, and the others."""
    loaded, refused = list[_Candidate](), list[RefusedFormat]()
    for entry in installed_entry_points(GROUP):
        distribution = entry.dist.name if entry.dist is not None else entry.module
        try:
            loaded.append(_Candidate(distribution, _load(entry)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a third-party module may raise anything
            refused.append(RefusedFormat(entry.name, distribution, _describe_fault(error)))
    own = [each for each in loaded if each.distribution == DISTRIBUTION]
    others = _refuse_clashes([each for each in loaded if each.distribution != DISTRIBUTION], own, refused)
    others = _refuse_clashes(others, others, refused)
    usable = {each.format.name: each.format for each in (*own, *others)}
    return dict(sorted(usable.items(), key=lambda item: (item[1].rank, item[0]))), tuple(refused)


def formats() -> dict[str, Format[Any]]:
    """Return all usable formats by name, in the order of their rank.

    Raises:
        ConfigurationError: ``FORMAT_INVALID``: there is none.
    """
    usable, _ = _installed()
    if not usable:
        raise ConfigurationError(
            "no format is installed: no distribution has a usable entry point in the group slipway.formats",
            reason="FORMAT_INVALID",
            remedy=f"install it again: {install_command(options='--force-reinstall')}",
        )
    return usable


def refused_formats() -> tuple[RefusedFormat, ...]:
    """Return the installed formats that cannot be used."""
    return _installed()[1]


def refused_format(name: str) -> RefusedFormat | None:
    """Return why the installed format of this name cannot be used; None if it can, or if there is none."""
    return next((each for each in refused_formats() if each.name == name and name not in formats()), None)


def load_format(name: str) -> Format[Any]:
    """Return the installed format with this name.

    Raises:
        ConfigurationError: ``FORMAT_UNKNOWN``; ``FORMAT_INVALID`` if it cannot be used.
    """
    if name in formats():
        return formats()[name]
    if refused := refused_format(name):
        raise refused.error()
    raise ConfigurationError(
        f"there is no format {name!r}",
        reason="FORMAT_UNKNOWN",
        remedy=did_you_mean(name, tuple(formats())),
        about={"format": name},
    )


def levels() -> tuple[str, ...]:
    """Return the quantization levels of all formats, each once."""
    named = (level for each in formats().values() for level in (*each.levels, each.quantization.unquantized))
    return tuple(dict.fromkeys(filter(None, named)))


def split_output(name: str) -> tuple[str, str]:
    """Split an output's name into format and level: ``gguf-q8_0`` is ``("gguf", "q8_0")``; the level is empty if unquantized."""
    kind, _, level = name.partition("-")
    return kind, level


def is_level(name: str) -> bool:
    """Return whether the output with this name is at a level of its format, and not its unquantized output or a variant."""
    kind, level = split_output(name)
    return kind in formats() and level in formats()[kind].levels


def format_of_output(name: str) -> Format[Any] | None:
    """Return the format of the output with this name; None if the format is not installed."""
    return formats().get(split_output(name)[0])


def runtime_of_output(name: str) -> Runtime | None:
    """Return the runtime of the output with this name, as its format says; None without one, or if the format is not installed."""
    known, (_, level) = format_of_output(name), split_output(name)
    return known.runtime_of(level) if known is not None else None


def runtimes_to_try() -> tuple[tuple[Format[Any], Runtime], ...]:
    """Return each runtime with its format, in the order in which to compare a folder of unknown name with their files.

    Variants come first, because their patterns are narrower; then the formats that are made from others.
    """
    known = [(each, runtime) for each in reversed(formats().values()) for runtime in each.runtimes()]
    return tuple(sorted(known, key=lambda pair: pair[1] is pair[0].runtime))


def is_adapter_alone(name: str) -> bool:
    """Return whether an output holds only an adapter, which is no model without its base; a variant without its own runtime holds more."""
    _, level = split_output(name)
    known, runtime = format_of_output(name), runtime_of_output(name)
    return (
        known is not None
        and runtime is not None
        and runtime.on_base
        and (not level or level in known.levels or level in known.variants.runtimes)
    )


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


def _load(entry: EntryPoint) -> Format[Any]:
    loaded = entry.load()
    if not isinstance(loaded, Format):
        raise TypeError(f"{entry.value} is not a Format")
    if loaded.name != entry.name:
        raise ValueError(f"its name is {loaded.name!r}")
    if loaded.usage is not None and not loaded.usage.path.is_file():
        raise FileNotFoundError(f"{'/'.join(loaded.usage.template)} does not exist")
    return loaded


def _describe_fault(error: BaseException) -> str:
    """Describe in one line why a format cannot be loaded."""
    if isinstance(error, ValidationError):
        errors = error.errors(include_url=False)
        return one_line("; ".join(": ".join((*map(str, each["loc"]), each["msg"])) for each in errors))
    return one_line(f"{type(error).__name__}: {error}")


def _refuse_clashes(
    candidates: list[_Candidate], rivals: list[_Candidate], refused: list[RefusedFormat]
) -> list[_Candidate]:
    """Return the formats that share neither name nor variable with a rival or with the common settings; refuse the others.

    Formats of other distributions that clash are all refused: choosing one would make other exports of the same configuration.
    """
    faults = [(each, _find_clash(each, rivals)) for each in candidates]
    refused += [RefusedFormat(each.format.name, each.distribution, fault) for each, fault in faults if fault]
    return [each for each, fault in faults if not fault]


def _find_clash(candidate: _Candidate, rivals: list[_Candidate]) -> str:
    variables = candidate.format.all_variables()
    for other in rivals:
        if other is candidate:
            continue
        if other.format.name == candidate.format.name:
            return f"{other.distribution} has a format of this name too"
        shared = sorted(set(variables) & set(other.format.all_variables()))
        if shared:
            return f"it shares the variable {shared[0]} with the format {other.format.name!r} of {other.distribution}"
    common = [name for name in variables if name in EXPORT_VARIABLES]
    return f"its variable {common[0]} belongs to {EXPORT_VARIABLES[common[0]]}" if common else ""
