"""The settings of one source, by dotted key with their origin, and its problems; the ``EXPORT_*`` variables, one per setting."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipway.configuration.schema import keys, parse_text
from slipway.formats.registry import formats, refused_format, refused_formats
from slipway.settings.export_variables import EXPORT_VARIABLES
from slipway.settings.problems import Problem
from slipway.texts import MalformedText

MOST_PROBLEMS = 100
"""Stop reading a source after this many problems: it is probably not a configuration."""

PREFIX = "EXPORT_"

ENVIRONMENT: Mapping[str, str] = {
    **EXPORT_VARIABLES,
    **{
        each.variable(setting): f"formats.{name}.{setting}"
        for name, each in formats().items()
        for setting in each.settings.model_fields
    },
}
"""Setting of each variable. Commas separate the items of a list; an empty variable counts as not set."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its source, such as ``export.yaml:12``, ``EXPORT_OUTPUT_DIR`` or ``--out``."""

    value: Any
    source: str


def put_setting(settings: dict[str, Setting], key: str, setting: Setting) -> None:
    """Add a setting, replacing an earlier value. A table replaces only the rows it names."""
    before = settings.get(key)
    if before is not None and isinstance(before.value, Mapping) and isinstance(setting.value, Mapping):
        sources = dict.fromkeys((before.source, setting.source))
        setting = Setting(_merge_tables(before.value, setting.value), ", ".join(sources))
    settings[key] = setting


def _merge_tables(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return one table with the rows of both; where both have a row, ``after`` wins, and rows that are tables are merged."""
    both = {
        name: _merge_tables(before[name], row)
        for name, row in after.items()
        if isinstance(row, Mapping) and isinstance(before.get(name), Mapping)
    }
    return {**before, **after, **both}


@dataclass
class Layer:
    """The settings of one source.

    Attributes:
        settings: Values by dotted key.
        problems: Faults of the source.
        warnings: One text for each thing that was ignored.
        broken: Keys whose value could not be read; no further problem is reported for them.
        replaced: Keys whose values in earlier sources do not count any more, as other settings of this one replace them.
    """

    settings: dict[str, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        """Return whether there are so many problems that the rest is not read."""
        return len(self.problems) >= MOST_PROBLEMS


def read_environment(environment: Mapping[str, str]) -> Layer:
    """Read the settings in the ``EXPORT_*`` variables.

    An unknown variable that resembles a known one is a problem, because it is probably a misspelling. Any other unknown
    variable is only a warning, because other programs use this prefix too.
    """
    layer = Layer()
    for name in sorted(environment):
        if layer.is_full:
            break
        text = environment[name]
        if not name.startswith(PREFIX) or not text.strip():
            continue
        if name not in ENVIRONMENT:
            _report_unknown(name, layer)
            continue
        key = ENVIRONMENT[name]
        try:
            layer.settings[key] = Setting(parse_text(key, text), name)
        except MalformedText as error:
            layer.problems.append(Problem(key, error.message, error.remedy, name))
            layer.broken.add(key)
    return layer


def _report_unknown(name: str, layer: Layer) -> None:
    for refused in refused_formats():
        own = f"{PREFIX}{refused.name.upper()}_"
        if refused_format(refused.name) and (name == f"{PREFIX}ENABLE_{refused.name.upper()}" or name.startswith(own)):
            error = refused.error()
            layer.problems.append(Problem(name, error.message, error.remedy, "environment"))
            return
    close = difflib.get_close_matches(name, sorted(ENVIRONMENT), n=1, cutoff=0.85)
    if close:
        layer.problems.append(
            Problem(name, "is not a variable of Slipway", f"did you mean {close[0]!r}?", "environment")
        )
    else:
        layer.warnings.append(f"environment variable {name} is unknown to Slipway and was ignored")


assert set(ENVIRONMENT.values()) == set(keys()), "every setting has one variable"
