"""What validation says of a model's parts: its multi-token head, its routers, and tensors of the base that an output lacks."""

from __future__ import annotations

import math

from slipway.texts import counted, printable
from slipway.validation.verdicts import Value

MOST_LOST = 0.1
"""Largest fall of the share of accepted drafts without a warning."""


class MultiTokenHead(Value):
    """How often the model accepts what its multi-token head drafts.

    At each token of the text, the head drafts the token after the next one. A draft is accepted if it is the model's own first choice there.

    Attributes:
        layers: Number of layers that the head has; the first one drafts.
        accepted_before: Share of accepted drafts in the base, 0 to 1; None without an adapter, or if it was not measured.
        accepted_after: Share in base + adapter, with the head as it is delivered; None if it was not measured.
        tokens: Number of drafts.
        not_run: Why nothing was measured; empty if it was.
    """

    layers: int = 1
    accepted_before: float | None = None
    accepted_after: float | None = None
    tokens: int = 0
    not_run: str = ""

    @property
    def said(self) -> str:
        """Return one sentence for people, without its end."""
        if self.accepted_after is None:
            return f"multi-token head: its drafts were not compared ({printable(self.not_run) or 'not measured'})"
        before = "" if self.accepted_before is None else f", {_percent(self.accepted_before)} before the fine-tune"
        return f"multi-token head: its drafts are accepted {_percent(self.accepted_after)} of the time{before}"

    @property
    def warning(self) -> str:
        """Return a warning if the fine-tune has moved the model away from its head; otherwise empty."""
        before, after = self.accepted_before, self.accepted_after
        if before is None or after is None or before - after <= MOST_LOST:
            return ""
        return (
            f"the fine-tune has moved away from its multi-token head, whose drafts are accepted {_percent(after)} of the time instead of "
            f"{_percent(before)}: serve without it, or train it too"
        )


class Routing(Value):
    """How often a mixture chooses the experts that base + adapter chooses, for the same tokens.

    Attributes:
        layers: Number of layers with experts.
        tokens: Number of tokens.
        experts: Experts that are chosen for a token in a layer.
        equal: Share of equal choices, 0 to 1.
        lowest: The same of the layer in which it is lowest.
        lowest_layer: That layer's number among those with experts, from 0.
    """

    layers: int
    tokens: int
    experts: int
    equal: float
    lowest: float
    lowest_layer: int

    @property
    def said(self) -> str:
        """Return one sentence for people, without its end."""
        return (
            f"routing: {_percent_down(self.equal)} of its choices of experts are those of base + adapter, {_percent_down(self.lowest)} in the layer "
            f"with the fewest ({self.lowest_layer + 1} of {self.layers})"
        )


class MissingPart(Value):
    """Tensors of one part of the base that an output lacks.

    Attributes:
        part: Name of the part (``slipway.model.weights.parts``).
        missing: Number of tensors that are not there.
        tensors: Number of tensors that the base has of it.
        first: Name of the first that is not there.
    """

    part: str
    missing: int
    tensors: int
    first: str

    @property
    def said(self) -> str:
        """Return what is missing, for people."""
        if self.missing == self.tensors:
            return f"the {self.part} of the base ({counted(self.tensors, 'tensor')}) is not in it"
        verb = "is" if self.missing == 1 else "are"
        return f"{self.missing} of {self.tensors} tensors of the base's {self.part} {verb} not in it, first {printable(self.first)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _percent_down(share: float) -> str:
    """Return a share in percent, rounded down, so that 100.0 % means all."""
    return f"{math.floor(1000 * share) / 10:.1f} %"
