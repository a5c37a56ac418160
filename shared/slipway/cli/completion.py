"""Complete words in a shell: settings of an export, formats with their levels, targets, and parameters of a stage."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, MutableMapping, Sequence

_HEAD = "_SLIPWAY_COMPLETED_HEAD"
"""Variable that holds the start of a word if the shell splits the word and completes only its last part."""
_SPLITTING = ("=", ":")
"""Signs at which bash splits a word."""


def join_words(environment: MutableMapping[str, str]) -> None:
    """Rejoin the words that bash splits at an equals sign or colon, because it completes only their last part.

    Args:
        environment: Environment of the process; changed if bash asks for the completion of such a word.
    """
    if environment.get("_SLIPWAY_COMPLETE") != "complete_bash":
        return
    try:
        words, at = environment["COMP_WORDS"].split("\n"), int(environment["COMP_CWORD"])
    except (KeyError, ValueError):
        return
    if not {*_SPLITTING} & {*words[: at + 1]}:
        return
    before, joins = _join_typed(words[:at])
    current = words[at] if at < len(words) else ""
    if current == "=" and before[-1].startswith("-"):
        current = ""
    elif current in _SPLITTING:
        environment[_HEAD], current = before.pop() + current, ""
    elif joins:
        environment[_HEAD] = before.pop()
    environment["COMP_WORDS"] = "\n".join([*before, current])
    environment["COMP_CWORD"] = str(len(before))


def _join_typed(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the words as they were typed, and whether the next part belongs to the last of them."""
    typed, joins = list[str](), False
    for number, word in enumerate(words):
        if word == "=" and number and words[number - 1].startswith("-"):
            joins = False  # an option's value is a separate word, after a space or an equals sign
        elif typed and (joins or word in _SPLITTING):
            typed[-1] += word
            joins = word in _SPLITTING
        else:
            typed.append(word)
    return typed, joins


def _complete_word(incomplete: str, environment: Mapping[str, str], complete: Callable[[str], list[str]]) -> list[str]:
    """Complete a word; leave out the start that the shell keeps to itself."""
    head = environment.get(_HEAD, "")
    return [word.removeprefix(head) for word in complete(head + incomplete) if word.startswith(head)]


def assignments(
    incomplete: str, keys: Sequence[str], values: Callable[[str], Sequence[str]], environment: Mapping[str, str]
) -> list[str]:
    """Return the completions of a ``KEY=VALUE`` word.

    Args:
        incomplete: Beginning of the word; only that of its last part if the shell splits the word.
        keys: All keys.
        values: Function that returns the values of a key with a fixed set of them.
        environment: Environment, after :func:`join_words`.
    """

    def complete(word: str) -> list[str]:
        key, equals, value = word.partition("=")
        if equals:
            *done, last = value.split(",")  # levels may be a list
            start = f"{key}=" + "".join(f"{part}," for part in done)
            possible = values(key) if key in keys else ()
            return [f"{start}{each}" for each in possible if each.startswith(last) and each not in done]
        matches = [each for each in keys if each.startswith(key)]
        if len(matches) == 1 and (possible := values(matches[0])):
            return [f"{matches[0]}={each}" for each in possible]
        return [f"{each}=" for each in matches]

    return _complete_word(incomplete, environment, complete)


def settings(incomplete: str) -> list[str]:
    """Complete settings for ``--set``, and the values of settings with a fixed set of them."""
    import os

    from slipway.configuration.schema import keys, usual_values

    return assignments(incomplete, tuple(keys()), usual_values, os.environ)


def formats(incomplete: str) -> list[str]:
    """Complete formats for ``-f``, their levels and settings, and the values of settings with a fixed set of them."""
    import os

    from slipway.configuration.flags import options_of, values_of
    from slipway.formats.registry import formats as installed

    def complete(word: str) -> list[str]:
        before, comma, item = word.rpartition(",")
        name, colon, options = item.partition(":")
        if not colon:
            return [f"{before}{comma}{each}" for each in installed() if each.startswith(name)]
        each = installed().get(name.lower())
        if each is None:
            return []
        done, plus, option = options.rpartition("+")
        start = f"{before}{comma}{name}:{done}{plus}"
        setting, equals, value = option.partition("=")
        if equals:
            return [f"{start}{setting}={known}" for known in values_of(each, setting) if known.startswith(value)]
        return [f"{start}{known}" for known in options_of(each) if known.startswith(option)]

    return _complete_word(incomplete, os.environ, complete)


def targets(incomplete: str) -> list[tuple[str, str]]:
    """Complete the names of targets, each with what it is."""
    from slipway.formats.targets import ALIASES, TARGETS

    known = {**TARGETS, **{other: TARGETS[name] for other, name in ALIASES.items()}}
    return [(name, what) for name, what in known.items() if name.startswith(incomplete)]


def arguments(parser: argparse.ArgumentParser, before: str, incomplete: str) -> list[tuple[str, str]]:
    """Return the words that a service's parser accepts at the cursor, each with its meaning.

    Args:
        parser: The parser.
        before: The word before the cursor.
        incomplete: Beginning of the word at the cursor.
    """
    actions = parser._actions
    valued = next((each for each in actions if before in each.option_strings and each.nargs != 0), None)
    if valued is not None:
        words = [(str(choice), "") for choice in valued.choices or ()]
    elif incomplete.startswith("-"):
        texts = parser._get_formatter()
        words = [(flag, texts._expand_help(each)) for each in actions for flag in each.option_strings]
    else:
        words = [(str(choice), "") for each in actions if not each.option_strings for choice in each.choices or ()]
    return [(word, text) for word, text in words if word.startswith(incomplete)]
