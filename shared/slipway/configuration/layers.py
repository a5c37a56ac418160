"""One source of settings: values by dotted key, each with where it came from, and what was wrong with the rest."""

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


def put(settings: dict[str, Setting], key: str, setting: Setting) -> None:
    """Add a setting to others, replacing what is there; of a table, only the rows that it names."""
    before = settings.get(key)
    if before is not None and isinstance(before.value, Mapping) and isinstance(setting.value, Mapping):
        sources = dict.fromkeys((before.source, setting.source))
        setting = Setting(_joined(before.value, setting.value), ", ".join(sources))
    settings[key] = setting


def _joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """A table with the rows of another put in; of rows that both have, value by value where they are tables themselves."""
    both = {
        name: _joined(before[name], row)
        for name, row in after.items()
        if isinstance(row, Mapping) and isinstance(before.get(name), Mapping)
    }
    return {**before, **after, **both}


MOST_PROBLEMS = 100
"""Problems after which nothing more is looked for in a source: it is no configuration."""


@dataclass
class Layer:
    """What one source says.

    Attributes:
        settings: Values by dotted key.
        problems: What could not be read.
        warnings: What was ignored.
        broken: Keys whose value could not be read, so that nothing else is said about them.
    """

    settings: dict[str, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        """Whether so much is wrong that the rest is not read."""
        return len(self.problems) >= MOST_PROBLEMS
