"""A problem in a configuration or an option, and the error that reports all problems."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass

from slipway.errors import MOST_TEXT, ConfigurationError
from slipway.sizes import parse_size
from slipway.texts import MalformedText, shortened


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a configuration.

    Attributes:
        key: Dotted path of the setting, such as ``formats.onnx.opset_version``.
        message: The fault, with the value.
        remedy: A setting that works.
        source: Source of the value: ``export.yaml:12``, or the name of a variable or flag; empty for a default.
    """

    key: str
    message: str
    remedy: str = ""
    source: str = ""

    def __str__(self) -> str:
        origin = f" ({self.source})" if self.source else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.key}{origin}: {self.message}{remedy}"

    def shortened(self) -> Problem:
        """Return the problem with its texts cut to the length of a message."""
        return Problem(
            shortened(self.key), shortened(self.message, 1000), shortened(self.remedy, 1000), shortened(self.source)
        )


def configuration_error(problems: Iterable[Problem], *, reason: str = "CONFIGURATION_INVALID") -> ConfigurationError:
    """Return the error that reports all problems; its ``about`` holds their keys and, as JSON, the problems themselves.

    If not all fit into a message, it reports those that fit and the number of the others.
    """
    unique = list(dict.fromkeys(problems))
    shown = _choose_fitting([problem.shortened() for problem in unique])
    count = "1 setting cannot" if len(unique) == 1 else f"{len(unique)} settings cannot"
    more = f"\n  and {len(unique) - len(shown)} more" if len(shown) < len(unique) else ""
    lines = "\n".join(f"  {problem}" for problem in shown)
    return ConfigurationError(
        f"{count} be used:\n{lines}{more}",
        reason=reason,
        about={
            "key": ",".join(problem.key for problem in shown),
            "problems": json.dumps([asdict(problem) for problem in shown]),
        },
    )


def _choose_fitting(problems: list[Problem]) -> list[Problem]:
    """Return as many of the first problems as fit into an error's message and, as JSON, into its ``about``."""
    room, kept = MOST_TEXT - 100, []
    for problem in problems:
        room -= max(len(str(problem)) + 3, len(json.dumps(asdict(problem))) + 2)
        if room < 0:
            break
        kept.append(problem)
    return kept


def near_names(name: str, known: Collection[str]) -> str:
    """Return a remedy for an unknown name: up to three near ones, whatever its case and signs; otherwise all known names."""
    by_letters = {_letters(other): other for other in known}
    asked = _letters(name)
    if asked in by_letters:
        names = [by_letters[asked]]
    else:
        close = difflib.get_close_matches(asked, sorted(by_letters), n=3, cutoff=0.5)
        close += [other for other in sorted(by_letters) if asked and other.startswith(asked) and other not in close]
        names = [by_letters[letters] for letters in close[:3]]
    if names:
        return f"did you mean {' or '.join(names)}?"
    return f"known here: {', '.join(known)}"


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a remedy for an unknown name: the closest known name, otherwise the list of known names."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    close = close or [other for other in sorted(known) if name and other.startswith(name)]
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known here: {', '.join(sorted(known))}"


def size_of(name: str, text: str) -> int:
    """Return the bytes of an option or argument such as ``8GiB``.

    Raises:
        ConfigurationError: The text is not a size.
    """
    try:
        return parse_size(text)
    except MalformedText as error:
        raise ConfigurationError(f"{name}: {error.message}", remedy=error.remedy, about={"key": name}) from error
