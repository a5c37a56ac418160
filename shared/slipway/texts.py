"""Texts for people: made safe to show on a terminal or page, free of secrets, and short; counts with their nouns.

Names of models, labels, paths and messages come from other people's files and requests. Some characters in them are commands to a
terminal, reverse the direction of the text after them, or make two different names look alike. Such characters are refused when a
text is read (:func:`hidden_character`), and replaced when it is shown (:func:`printable`, :func:`one_line`, :func:`escaped_json`).

Secrets are values of secret-looking environment variables, and passwords in URLs (:func:`redact`).
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping
from functools import cache
from urllib.parse import unquote

# Control characters except tabs and line ends; marks that change the direction of text; invisible characters and blank letters;
# other line ends; halves of surrogate pairs.
_UNSEEN = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
# Joiners are legal between the letters of some scripts, and between the parts of an emoji.
_JOINED = r"[^\x00-\x7f\u200c\u200d]"
_LONE_JOINER = rf"(?<!{_JOINED})[\u200c\u200d]|[\u200c\u200d](?!{_JOINED})"
_HIDDEN = re.compile(rf"[{_UNSEEN}]|{_LONE_JOINER}")
_NOT_IN_A_LINE = re.compile(rf"[{_UNSEEN}\t\n]|{_LONE_JOINER}")
_SPACE = re.compile(r"\s+")

_UNSAFE_IN_FILES = re.compile(r"[^A-Za-z0-9._-]+")

QUOTED_LENGTH = 200
"""Most characters of a value quoted in a message."""

SECRET_NAMES = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(?:API|ACCESS|PRIVATE|SIGNING|ENCRYPTION)_?KEY|(?:^|_)(?:PAT|PWD|DSN|AUTH|COOKIE|HEADERS)$",
    re.IGNORECASE,
)
"""Names of environment variables whose values are secret."""

_NO_SECRETS = frozenset({"PWD"})
"""The current folder; ``MYSQL_PWD`` is a password."""

_URL_PASSWORD = re.compile(r'(?<=:/)(/?[^\s/@:"]{0,512}):(?!\d{1,5}/)([^\s"]{1,512})(?=@)')
"""User and password of a URL, also of one that was read as a path and so has lost a slash.

A password may hold ``/`` and ``@`` that are not escaped; a port with a path after it is no password.
"""


class MalformedText(ValueError):  # noqa: N818 - its catcher turns it into an error that names the setting
    """A text does not express a value of the expected kind; ``remedy`` says how to write one."""

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.message, self.remedy = message, remedy


def printable(text: str) -> str:
    """Replace terminal commands and invisible characters; keep tabs and line ends."""
    return _HIDDEN.sub("\ufffd", text)


def one_line(text: str) -> str:
    """Return a printable text on one line, with single spaces."""
    return printable(_SPACE.sub(" ", text)).strip()


def escaped_json(document: str) -> str:
    r"""Replace the same characters in a JSON document by ``\u`` escapes, so that it is safe to show and keeps its meaning.

    They can only be within strings, because JSON has no such characters elsewhere.
    """
    return _HIDDEN.sub(lambda match: _escape(match.group()), document)


def hidden_character(text: str) -> str:
    """Return the first character that a text of one line must not contain, such as ``U+202E``; empty if there is none."""
    match = _NOT_IN_A_LINE.search(text)
    return f"U+{ord(match.group()):04X}" if match else ""


def shortened(text: str, most: int = QUOTED_LENGTH) -> str:
    """Shorten a text to at most ``most`` characters: keep its beginning and end."""
    if len(text) <= most:
        return text
    left_out = f" … {len(text) - most} characters … "
    kept = max(most - len(left_out), 2)
    return f"{text[: kept - kept // 2]}{left_out}{text[-(kept // 2) :]}"


def file_name(text: str) -> str:
    """Return a text as the beginning of a file's name that is safe everywhere, at most 80 characters; empty if nothing of it is."""
    return _UNSAFE_IN_FILES.sub("-", text).strip("._-")[:80]


def quoted(value: object) -> str:
    """Quote a value for a message: on one line, and of limited length."""
    return shortened(printable(_QUOTING.repr(value)))


def number_of(text: str, *, most: int) -> int | None:
    """Parse a whole number written in digits; return None for any other text, and for a number above ``most``.

    Unlike ``str.isdigit`` and ``int``, this refuses ``²``, and never fails on thousands of digits.
    """
    digits = text.lstrip("0")
    if not text or not set(text) <= set("0123456789") or len(digits) > len(str(most)):
        return None
    number = int(digits or "0")
    return number if number <= most else None


class _Quoting(reprlib.Repr):
    """Represents a large value by its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = QUOTED_LENGTH
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = 10

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002 - the library's signature
        """Write the digits of a number; for one that is too long, their count."""
        digits = int(x.bit_length() * 0.30103)
        return f"a number of {digits} digits" if digits > QUOTED_LENGTH else repr(x)


_QUOTING = _Quoting()


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place]:02x}{units[place + 1]:02x}" for place in range(0, len(units), 2))


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun in the singular or plural: ``1 file``, ``1,280 tokens``.

    Args:
        count: The number.
        noun: The noun in the singular; in a noun of several words, the last one takes the s.
        plural: The plural, if it is not made by an s.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def redact_address(url: str) -> str:
    """Return a malformed address without its user and its query, which may be secret; a good one has neither."""
    scheme, slashes, rest = url.partition("//")
    place, mark, _ = rest.partition("?")
    before, at, host = place.rpartition("@")
    return f"{scheme}{slashes}{'…' if before else ''}{at}{host}{'?…' if mark else ''}"


def redact(text: str) -> str:
    """Return a text without the values of secret-looking environment variables, and without passwords of URLs."""
    for value in _secrets():
        text = text.replace(value, "***")
    return _URL_PASSWORD.sub(r"\1:***", text)


@cache
def _secrets() -> tuple[str, ...]:
    return secrets_of(os.environ)


def secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of variables with secret-looking names, and passwords in URLs; leave out short ones, which occur in ordinary text."""
    named = {value for name, value in environment.items() if SECRET_NAMES.search(name) and name not in _NO_SECRETS}
    passwords = {unquote(match[2]) for value in environment.values() for match in _URL_PASSWORD.finditer(value)}
    secrets = {value for value in named | passwords if len(value) >= 8}
    return tuple(sorted(secrets, key=len, reverse=True))
