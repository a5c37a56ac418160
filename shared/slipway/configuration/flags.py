"""Read settings from command-line flags, and the formats to make from ``-f FORMAT[:OPTION[+OPTION…]],…``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from slipway.configuration.layers import Layer, Setting, put_setting
from slipway.configuration.schema import is_list, is_table, keys, parse_text, unknown_setting, values
from slipway.formats.contract import Format
from slipway.formats.registry import formats, refused_format
from slipway.formats.settings import LevelSettings, every_choice
from slipway.formats.targets import ALIASES, TARGETS
from slipway.settings.problems import Problem, did_you_mean, near_names
from slipway.texts import MalformedText, quoted

_COMMON: Mapping[str, str] = {
    "--base-model": "base_model.name",
    "--checkpoint": "checkpoint.path",
    "--out": "output.directory",
    "--target": "output.target",
    "RUN": "checkpoint.path",
}
FLAGS: Mapping[str, str] = {
    **_COMMON,
    **{flag: f"formats.{name}.{key}" for name, each in formats().items() for flag, key in each.rules.flags.items()},
}
"""Setting of each flag; formats bring the flags of their own settings."""

FLAG = "-f"
NONE = "none"
"""Option that names the unquantized output."""
COMMON = "optimization.quantization"
_OWN = ("enabled", "quantization", "unquantized")
"""Settings that the format's name and its levels give."""


def read_flags(
    flags: Mapping[str, str | None],
    assignments: Sequence[str] | Mapping[str, Any],
    *,
    requested: Sequence[str] = (),
) -> Layer:
    """Read the settings in the flags of :data:`FLAGS`, in ``--set key.path=value`` and in ``-f``.

    Args:
        flags: Text of each flag of :data:`FLAGS`; None if not given.
        assignments: ``key.path=value`` texts; later ones win. Or values by ``key.path``: a text as in such a text, or what YAML would give.
        requested: Texts of ``-f``: the formats to make, each with its levels and settings.
    """
    layer = Layer()
    if isinstance(assignments, Mapping):
        _read_values(assignments, layer)
        assignments = ()
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


def _read_values(values: Mapping[str, Any], layer: Layer) -> None:
    """Read settings that a program gives by their keys."""
    for name, value in values.items():
        if layer.is_full:
            break
        key = str(name).removeprefix("export.")
        source = f"settings[{quoted(key)}]"
        if isinstance(value, str | PurePath):
            read_text(layer, key, str(value), source)
        elif key in keys():
            put_setting(layer.settings, key, Setting(list(value) if isinstance(value, tuple) else value, source))
        else:
            layer.problems.append(unknown_setting(key, did_you_mean(key, keys()), source))


@dataclass
class _Request:
    """What is asked of one format.

    Attributes:
        levels: Levels in the order in which they are named.
        unquantized: Whether the unquantized output is named.
        settings: Texts of further settings by name.
        words: The words that ask for it.
    """

    levels: list[str] = field(default_factory=list)
    unquantized: bool = False
    settings: dict[str, list[str]] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        return f"{FLAG} {','.join(self.words)}"


def read_requested(texts: Sequence[str], layer: Layer) -> None:
    """Add the settings that make these formats and no others.

    Args:
        texts: Values of ``-f``, each with one format or several separated by commas; none changes nothing.
        layer: Layer with the settings of the other flags, which may not say otherwise.
    """
    wanted = _read_words(texts, layer) if texts else {}
    if not wanted:
        return
    if COMMON in layer.settings:
        remedy = f"name the levels with the formats, like {FLAG} {next(iter(wanted))}:LEVEL"
        layer.problems.append(Problem(COMMON, f"has no effect beside {FLAG}", remedy, layer.settings[COMMON].source))
    layer.replaced.add(COMMON)
    for name, each in formats().items():
        asked = wanted.get(name)
        if asked is None:
            _leave_out(each, layer)
        for key, setting in _settings(each, asked) if asked else ():
            _put(layer, key, setting)
    for name, asked in wanted.items():
        for key, given in asked.settings.items():
            read_text(layer, f"formats.{name}.{key}", ",".join(given), asked.source)


def _read_words(texts: Sequence[str], layer: Layer) -> dict[str, _Request]:
    """Return what is asked of each format; add the problems to the layer."""
    wanted: dict[str, _Request] = {}
    words = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not words:
        layer.problems.append(Problem(FLAG, "names no format", near_names("", tuple(formats()))))
    for word in words:
        if layer.is_full:
            break
        _read_word(word, wanted, layer)
    return wanted


def _leave_out(each: Format[Any], layer: Layer) -> None:
    """Turn a format off, whatever earlier sources say."""
    key = f"formats.{each.name}.enabled"
    layer.replaced |= {key, f"formats.{each.name}.quantization"}
    if key in layer.settings or each.settings.model_fields["enabled"].default:
        _put(layer, key, Setting(False, f"{FLAG}, which does not name it"))


def _put(layer: Layer, key: str, setting: Setting) -> None:
    """Add a setting, and a problem if another flag says otherwise."""
    before = layer.settings.get(key)
    if before is not None and before.value != setting.value:
        layer.problems.append(Problem(key, f"contradicts {setting.source}", "keep one of the two", before.source))
    layer.settings[key] = setting


def _settings(each: Format[Any], asked: _Request) -> Iterator[tuple[str, Setting]]:
    """Yield the settings that make what is asked of a format."""
    section = f"formats.{each.name}"
    yield f"{section}.enabled", Setting(True, asked.source)
    if issubclass(each.settings, LevelSettings):
        yield f"{section}.quantization", Setting(list(asked.levels), asked.source)
        yield f"{section}.unquantized", Setting(asked.unquantized or not asked.levels, asked.source)


def _read_word(word: str, wanted: dict[str, _Request], layer: Layer) -> None:
    name, colon, options = word.partition(":")
    each = formats().get(name.strip().lower())
    if each is None:
        layer.problems.append(_unknown_format(name.strip()))
        return
    asked = wanted.setdefault(each.name, _Request())
    asked.words.append(word)
    if colon and not options.strip("+ "):
        remedy = f"leave the colon out, or name one of {', '.join(options_of(each))}"
        layer.problems.append(Problem(FLAG, f"{quoted(word)} names no option", remedy))
    if not colon:
        asked.unquantized = True
    for option in (part.strip() for part in options.split("+")):
        if option:
            _read_option(each, option, asked, layer)


def _read_option(each: Format[Any], option: str, asked: _Request, layer: Layer) -> None:
    setting, equals, value = (part.strip() for part in option.partition("="))
    if equals:
        setting = setting.lower()
        if setting.partition(".")[0] not in settings_of(each):
            layer.problems.append(_unknown_setting(each, setting))
        elif setting in asked.settings and not is_list(f"formats.{each.name}.{setting}"):
            layer.problems.append(Problem(f"formats.{each.name}.{setting}", "is given twice", "keep one value", FLAG))
        else:
            known = value.lower() in values_of(each, setting)
            asked.settings.setdefault(setting, []).append(value.lower() if known else value)
        return
    level = option.lower()
    if level in (NONE, each.quantization.unquantized):
        asked.unquantized = True
    elif level in each.levels:
        asked.levels += [level] if level not in asked.levels else []
    else:
        layer.problems.append(_unknown_option(each, option))


def settings_of(each: Format[Any]) -> tuple[str, ...]:
    """Return the settings of a format that an option may give."""
    return tuple(name for name in each.settings.model_fields if name not in _OWN)


def options_of(each: Format[Any]) -> tuple[str, ...]:
    """Return the options of a format: its levels, with ``none``, and its settings, each with an equals sign."""
    levels = (NONE, *each.levels) if each.levels else ()
    return (*levels, *(f"{name}=" for name in settings_of(each)))


def values_of(each: Format[Any], setting: str) -> tuple[str, ...]:
    """Return the values of a format's setting with a fixed set of them, or of the items of one that is a list."""
    key = f"formats.{each.name}.{setting}"
    return (values(key) if key in keys() else ()) or tuple(every_choice(each.settings).get(setting, ()))


def _unknown_format(name: str) -> Problem:
    if refused := refused_format(name.lower()):
        error = refused.error()
        return Problem(FLAG, error.message, error.remedy)
    lowered = name.lower()
    if lowered in (*TARGETS, *ALIASES):
        return Problem(FLAG, f"{quoted(name)} is a target, not a format", f"use --target {lowered}")
    known = tuple(formats())
    of_files = [each.name for each in formats().values() if lowered.lstrip(".") in _other_words(each)]
    remedy = f"did you mean {' or '.join(of_files)}?" if of_files else near_names(name, known)
    return Problem(FLAG, f"{quoted(name)} is not a format", remedy)


def _other_words(each: Format[Any]) -> set[str]:
    """Return other words for a format: its runtime, and the suffixes of its files."""
    runtimes = list(each.runtimes())
    suffixes = {name.rpartition(".")[2] for runtime in runtimes for name in runtime.files if name.startswith("*.")}
    return {runtime.name.lower() for runtime in runtimes} | suffixes


def _unknown_setting(each: Format[Any], setting: str) -> Problem:
    key = f"formats.{each.name}.{setting}"
    if setting in _OWN:
        return Problem(key, f"is what {FLAG} itself says", f"write {each.name}, or {each.name}:LEVEL", FLAG)
    return Problem(key, "is not a setting", near_names(setting, settings_of(each)), FLAG)


def _unknown_option(each: Format[Any], option: str) -> Problem:
    key, level = f"formats.{each.name}.quantization", option.lower()
    by_value = next((name for name in settings_of(each) if level in values_of(each, name)), "")
    if by_value:
        remedy = f"write {each.name}:{by_value}={level}"
        return Problem(f"formats.{each.name}", f"{quoted(option)} is a value of its setting {by_value}", remedy, FLAG)
    if not each.levels:
        known = ", ".join(options_of(each))
        return Problem(f"formats.{each.name}", f"has no levels, and {quoted(option)} is no setting", known, FLAG)
    if refused := each.quantization.refused.get(level):
        remedy = f"write {each.name}:{refused.instead}"
        return Problem(key, f"{level} is not delivered as {each.name}: {refused.why}", remedy, FLAG)
    others = [f"{other.name}:{level}" for other in formats().values() if level in other.levels]
    near = near_names(option, (*each.levels, *filter(None, (each.quantization.unquantized,))))
    if others:
        return Problem(key, f"{level} is not a level of {each.name}", f"{near}; there is {' and '.join(others)}", FLAG)
    return Problem(key, f"{quoted(option)} is not a level of {each.name}", near, FLAG)


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
