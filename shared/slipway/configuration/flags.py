"""Read settings from command-line flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipway.configuration.layers import Layer, Setting, put_setting
from slipway.configuration.schema import is_table, keys, parse_text, unknown_setting
from slipway.formats.registry import formats
from slipway.settings.problems import Problem, did_you_mean
from slipway.texts import MalformedText

_COMMON: Mapping[str, str] = {
    "--base-model": "base_model.name",
    "--checkpoint": "checkpoint.path",
    "--out": "output.directory",
}
FLAGS: Mapping[str, str] = {
    **_COMMON,
    **{flag: f"formats.{name}.{key}" for name, each in formats().items() for flag, key in each.flags.items()},
}
"""Setting of each flag; formats bring the flags of their own settings."""


def read_flags(flags: Mapping[str, str | None], assignments: Sequence[str]) -> Layer:
    """Read the settings in the flags of :data:`FLAGS` and in ``--set key.path=value``.

    Args:
        flags: Text of each flag of :data:`FLAGS`; None if not given.
        assignments: ``key.path=value`` texts; later ones win.
    """
    layer = Layer()
    for assignment in assignments:
        if layer.is_full:
            break
        key, equals, text = assignment.partition("=")
        key = key.strip().removeprefix("export.")
        if not equals:
            layer.problems.append(
                Problem(key, "--set needs a value", f"write --set {key or 'key.path'}=VALUE", "--set")
            )
        else:
            _read(layer, key, text, f"--set {key}")
    for flag, given in flags.items():
        if given is None:
            continue
        if flag not in FLAGS:
            layer.problems.append(Problem(flag, "belongs to a format that is not installed", "leave it out", flag))
        else:
            _read(layer, FLAGS[flag], given, flag)
    return layer


def _read(layer: Layer, key: str, text: str, source: str) -> None:
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
