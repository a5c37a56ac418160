"""The ``EXPORT_*`` variables: one per setting."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from slipway.configuration.layers import Layer, Setting
from slipway.configuration.schema import keys, parse_text
from slipway.formats.registry import formats, refused_format, refused_formats
from slipway.settings.export_variables import EXPORT_VARIABLES
from slipway.settings.problems import Problem
from slipway.texts import MalformedText

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
            _unknown(name, layer)
            continue
        key = ENVIRONMENT[name]
        try:
            layer.settings[key] = Setting(parse_text(key, text), name)
        except MalformedText as error:
            layer.problems.append(Problem(key, error.message, error.remedy, name))
            layer.broken.add(key)
    return layer


def _unknown(name: str, layer: Layer) -> None:
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
