"""The settings of one source: values by dotted key with their origin, and the problems found in the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipway.settings.problems import Problem


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


MOST_PROBLEMS = 100
"""Stop reading a source after this many problems: it is probably not a configuration."""


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
