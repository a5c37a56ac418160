"""One thing wrong with a configuration, and the error that carries all of them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass

from slipway.errors import MOST_TEXT, ConfigurationError
from slipway.texts import shortened


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration.

    Attributes:
        key: Dotted path of the setting, such as ``formats.onnx.opset_version``.
        message: What is wrong with it, naming the value.
        remedy: A setting that works.
        source: Where the value came from: ``export.yaml:12``, a variable's or a flag's name; empty for a default.
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
        """The same with texts that fit a message."""
        return Problem(
            shortened(self.key), shortened(self.message, 1000), shortened(self.remedy, 1000), shortened(self.source)
        )


def configuration_error(problems: Iterable[Problem], *, reason: str = "CONFIGURATION_INVALID") -> ConfigurationError:
    """The error that reports all of the problems; ``about`` holds their keys and, as JSON, the problems themselves.

    Of more than a message takes, those that fit are reported, and how many more there are.
    """
    unique = list(dict.fromkeys(problems))
    found = _fitting([problem.shortened() for problem in unique])
    count = "1 setting cannot" if len(unique) == 1 else f"{len(unique)} settings cannot"
    more = f"\n  and {len(unique) - len(found)} more" if len(found) < len(unique) else ""
    lines = "\n".join(f"  {problem}" for problem in found)
    return ConfigurationError(
        f"{count} be used:\n{lines}{more}",
        reason=reason,
        about={
            "key": ",".join(problem.key for problem in found),
            "problems": json.dumps([asdict(problem) for problem in found]),
        },
    )


def _fitting(problems: list[Problem]) -> list[Problem]:
    """The first problems, as many as go into a message and, as JSON, into what it is about."""
    room, found = MOST_TEXT - 100, []
    for problem in problems:
        room -= max(len(str(problem)) + 3, len(json.dumps(asdict(problem))) + 2)
        if room < 0:
            break
        found.append(problem)
    return found


def did_you_mean(name: str, known: Collection[str], *, all_when_none: bool = True) -> str:
    """A remedy for an unknown name: the closest known one, otherwise the list of them."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    close = close or [other for other in sorted(known) if name and other.startswith(name)]
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known here: {', '.join(sorted(known))}" if all_when_none else ""
