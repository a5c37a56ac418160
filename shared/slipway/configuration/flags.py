"""Read settings from command-line flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipway.configuration.assignments import read_text
from slipway.configuration.layers import Layer
from slipway.configuration.requested_formats import read_requested
from slipway.formats.registry import formats
from slipway.settings.problems import Problem

_COMMON: Mapping[str, str] = {
    "--base-model": "base_model.name",
    "--checkpoint": "checkpoint.path",
    "--out": "output.directory",
    "--target": "output.target",
    "RUN": "checkpoint.path",
}
FLAGS: Mapping[str, str] = {
    **_COMMON,
    **{flag: f"formats.{name}.{key}" for name, each in formats().items() for flag, key in each.flags.items()},
}
"""Setting of each flag; formats bring the flags of their own settings."""


def read_flags(flags: Mapping[str, str | None], assignments: Sequence[str], *, requested: Sequence[str] = ()) -> Layer:
    """Read the settings in the flags of :data:`FLAGS`, in ``--set key.path=value`` and in ``-f``.

    Args:
        flags: Text of each flag of :data:`FLAGS`; None if not given.
        assignments: ``key.path=value`` texts; later ones win.
        requested: Texts of ``-f``: the formats to make, each with its levels and settings.
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
            read_text(layer, key, text, f"--set {key}")
    for flag, given in flags.items():
        if given is None:
            continue
        if flag not in FLAGS:
            layer.problems.append(Problem(flag, "belongs to a format that is not installed", "leave it out", flag))
        else:
            read_text(layer, FLAGS[flag], given, flag)
    read_requested(requested, layer)
    return layer
