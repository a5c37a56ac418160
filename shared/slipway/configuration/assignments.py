"""Read a setting that is given as text."""

from __future__ import annotations

from slipway.configuration.layers import Layer, Setting, put_setting
from slipway.configuration.schema import is_table, keys, parse_text, unknown_setting
from slipway.settings.problems import Problem, did_you_mean
from slipway.texts import MalformedText


def read_text(layer: Layer, key: str, text: str, source: str) -> None:
    """Add a setting to a layer, or the problem that it has.

    Args:
        layer: Layer that receives it.
        key: Dotted path of the setting, or of a row of one.
        text: Its value as text.
        source: Where it comes from, for messages.
    """
    table = next((name for name in keys() if is_table(name) and key.startswith(f"{name}.")), "")
    if table:
        key, text = table, f"{key.removeprefix(f'{table}.')}={text}"
    if key not in keys():
        layer.problems.append(unknown_setting(key, did_you_mean(key, keys()), source))
        return
    try:
        put_setting(layer.settings, key, Setting(parse_text(key, text), source))
    except MalformedText as error:
        layer.problems.append(Problem(key, error.message, error.remedy, source))
        layer.broken.add(key)
