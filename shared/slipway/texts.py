"""Texts from elsewhere: clean enough for a terminal or a page, and short enough for a message.

Names of models, labels, paths and messages come from other people's files and requests. Some characters in them would be obeyed
by a terminal, turn the direction of what follows, or make two different names look alike. They are refused where a text enters
(:func:`hidden_character`), and replaced where one is shown (:func:`printable`, :func:`one_line`, :func:`escaped_json`).
"""

from __future__ import annotations

import re
import reprlib

# Control characters but tabs and line ends; what turns the direction of text; what takes no room, and letters that are blank;
# other line ends; halves of characters.
_UNSEEN = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
# Joiners belong between the letters of some scripts, and between the parts of an emoji.
_JOINED = r"[^\x00-\x7f\u200c\u200d]"
_LONE_JOINER = rf"(?<!{_JOINED})[\u200c\u200d]|[\u200c\u200d](?!{_JOINED})"
_HIDDEN = re.compile(rf"[{_UNSEEN}]|{_LONE_JOINER}")
_NOT_IN_A_LINE = re.compile(rf"[{_UNSEEN}\t\n]|{_LONE_JOINER}")
_SPACE = re.compile(r"\s+")

QUOTED_LENGTH = 200
"""Characters of a value that a message repeats."""


class MalformedText(ValueError):  # noqa: N818 - where it is caught it becomes an error that says which setting it is
    """A text stands for no value of the kind that is wanted; ``remedy`` says what does."""

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.message, self.remedy = message, remedy


def printable(text: str) -> str:
    """Replace what a terminal would obey and what hides from a reader; tabs and line ends stay."""
    return _HIDDEN.sub("\ufffd", text)


def one_line(text: str) -> str:
    """Return a printable text on one line, with single spaces."""
    return printable(_SPACE.sub(" ", text)).strip()


def escaped_json(document: str) -> str:
    r"""Write the same characters in a JSON document as ``\u`` escapes, so that it means the same and is safe to show.

    They can only be within strings: elsewhere, JSON has no such characters.
    """
    return _HIDDEN.sub(lambda found: _escape(found.group()), document)


def hidden_character(text: str) -> str:
    """Return the first character that a text of one line must not hold, such as ``U+202E``; empty when there is none."""
    found = _NOT_IN_A_LINE.search(text)
    return f"U+{ord(found.group()):04X}" if found else ""


def shortened(text: str, most: int = QUOTED_LENGTH) -> str:
    """Return a text of at most ``most`` characters: of a longer one, the beginning and the end."""
    if len(text) <= most:
        return text
    left_out = f" … {len(text) - most} characters … "
    kept = max(most - len(left_out), 2)
    return f"{text[: kept - kept // 2]}{left_out}{text[-(kept // 2) :]}"


def quoted(value: object) -> str:
    """Return a value as a message repeats it: on one line, and of bounded length however large it is."""
    return shortened(printable(_QUOTING.repr(value)))


def number_of(text: str, *, most: int) -> int | None:
    """Return the whole number that digits stand for; None for any other text, and for more than ``most``.

    Python counts ``²`` among the digits, which it does not read as a number, and reads no number of many thousand digits.
    """
    digits = text.lstrip("0")
    if not text or not set(text) <= set("0123456789") or len(digits) > len(str(most)):
        return None
    number = int(digits or "0")
    return number if number <= most else None


class _Quoting(reprlib.Repr):
    """Looks at the beginning of a large value alone."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = QUOTED_LENGTH
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = 10

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002 - the library's signature
        """The digits; how many there are of a number that has more than fit."""
        digits = int(x.bit_length() * 0.30103)
        return f"a number of {digits} digits" if digits > QUOTED_LENGTH else repr(x)


_QUOTING = _Quoting()


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place]:02x}{units[place + 1]:02x}" for place in range(0, len(units), 2))
