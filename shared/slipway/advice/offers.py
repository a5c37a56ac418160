"""Every output that could be made, with its size for a model, and why it cannot be made here: what a form offers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipway.advice.candidates import Subject, find_refusal
from slipway.errors import ModelExportError
from slipway.formats.contract import Format
from slipway.formats.registry import formats, translate_format_errors
from slipway.machine.doctor import FormatHealth


@dataclass(frozen=True, slots=True)
class Offer:
    """One output of a format.

    Attributes:
        format: Its format.
        title: The format in a few words.
        level: Its level; empty: unquantized.
        size_bytes: Estimated size, from above; None without a model.
        unfit: Why it cannot be made; empty if it can.
    """

    format: str
    title: str
    level: str
    size_bytes: int | None = None
    unfit: str = ""

    @property
    def output(self) -> str:
        """Return the name of its folder."""
        return f"{self.format}-{self.level}" if self.level else self.format

    @property
    def request(self) -> str:
        """Return how it is asked for after ``-f``."""
        return f"{self.format}:{self.level or 'none'}"


def offers(subject: Subject | None = None, *, health: Sequence[FormatHealth] | None = None) -> tuple[Offer, ...]:
    """Return all outputs of the installed formats, in the order of the formats and their levels.

    Args:
        subject: The model; None for offers without sizes.
        health: What this machine can make; None if another machine makes it.
    """
    missing = {each.name: each.detail for each in health or () if not each.available}
    return tuple(offer for each in formats().values() for offer in _offers(each, subject, missing))


def _offers(each: Format[Any], subject: Subject | None, missing: dict[str, str]) -> Iterator[Offer]:
    for level in ("", *each.levels):
        unfit = missing.get(f"{each.name}-<level>" if level else each.name, "")
        size = None
        try:
            if subject is not None and each.output_bytes is not None:
                with translate_format_errors(each):
                    size = int(each.output_bytes(each.settings(), level, subject.size))
            if subject is not None and subject.config:
                unfit = unfit or find_refusal(each, each.settings(), level, subject.config)
        except ModelExportError as error:
            unfit = unfit or str(error)
        yield Offer(each.name, each.title, level, size, unfit)
