"""Complete ``KEY=VALUE`` words in a shell: settings of an export, and parameters of a stage."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, MutableMapping, Sequence

_KEY = "_SLIPWAY_COMPLETED_KEY"
"""Variable with the key whose value is completed, if the shell splits key and value."""


def join_words(environment: MutableMapping[str, str]) -> None:
    """Join the words of ``KEY=VALUE`` again, which bash splits to complete the value alone.

    Args:
        environment: Environment of the process; changed if bash asks for the completion of such a value.
    """
    if environment.get("_SLIPWAY_COMPLETE") != "complete_bash":
        return
    try:
        words, at = environment["COMP_WORDS"].split("\n"), int(environment["COMP_CWORD"])
    except (KeyError, ValueError):
        return
    if "=" not in words[: at + 1]:
        return
    before, current = words[:at], words[at] if at < len(words) else ""
    if current == "=":
        before, current = [*before, "="], ""
    # An option's value is a separate word, after a space or an equals sign.
    before = [word for number, word in enumerate(before) if not (word == "=" and before[number - 1].startswith("-"))]
    if before[-1] == "=":
        environment[_KEY] = before[-2]
        del before[-2:]
    environment["COMP_WORDS"] = "\n".join([*before, current])
    environment["COMP_CWORD"] = str(len(before))


def assignments(
    incomplete: str, keys: Sequence[str], values: Callable[[str], Sequence[str]], environment: Mapping[str, str]
) -> list[str]:
    """Return the completions of a ``KEY=VALUE`` word.

    Args:
        incomplete: Beginning of the word; only that of the value if the shell splits the word.
        keys: All keys.
        values: Function that returns the values of a key with a fixed set of them.
        environment: Environment, after :func:`join_words`.
    """
    alone = environment.get(_KEY, "")
    key, equals, value = (alone, "=", incomplete) if alone else incomplete.partition("=")
    if equals:
        *done, last = value.split(",")  # levels may be a list
        start = "".join(f"{part}," for part in done)
        found = (
            [f"{start}{each}" for each in values(key) if each.startswith(last) and each not in done]
            if key in keys
            else []
        )
        return found if alone else [f"{key}={each}" for each in found]
    found = [each for each in keys if each.startswith(key)]
    if len(found) == 1 and (possible := values(found[0])):
        return [f"{found[0]}={each}" for each in possible]
    return [f"{each}=" for each in found]


def settings(incomplete: str) -> list[str]:
    """Complete settings for ``--set``, and the values of settings with a fixed set of them."""
    import os

    from slipway.configuration.schema import keys, usual_values

    return assignments(incomplete, tuple(keys()), usual_values, os.environ)


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
