"""Command-line flags as settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipway.configuration.layers import Layer, Setting, put
from slipway.configuration.schema import from_text, is_table, keys
from slipway.settings.problems import Problem, did_you_mean

FLAGS: Mapping[str, str] = {
    "--base-model": "base_model.name",
    "--checkpoint": "checkpoint.path",
    "--out": "output.directory",
}


def read_flags(flags: Mapping[str, str | None], assignments: Sequence[str]) -> Layer:
    """The settings in flags of their own and in ``--set key.path=value``.

    Args:
        flags: Flag of :data:`FLAGS` to its text; None when not given.
        assignments: ``key.path=value`` texts; a later one wins.
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
        if given is not None:
            _read(layer, FLAGS[flag], given, flag)
    return layer


def _read(layer: Layer, key: str, text: str, source: str) -> None:
    table = next((name for name in keys() if is_table(name) and key.startswith(f"{name}.")), "")
    if table:
        key, text = table, f"{key.removeprefix(f'{table}.')}={text}"
    if key not in keys():
        layer.problems.append(Problem(key, "is not a setting", did_you_mean(key, keys()), source))
        return
    try:
        put(layer.settings, key, Setting(from_text(key, text), source))
    except ValueError as error:
        message, _, remedy = str(error).partition("|")
        layer.problems.append(Problem(key, message, remedy, source))
        layer.broken.add(key)
