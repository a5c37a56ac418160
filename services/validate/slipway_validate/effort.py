"""What each effort of a validation computes: ``standard`` is the full evidence, ``quick`` leaves some out, ``thorough`` adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipway.validation.effort import Effort


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of one effort.

    Attributes:
        most_windows: Largest number of windows, whatever is requested.
        windows_factor: Windows, and disk for their logits, as a multiple of those requested.
        every_case: Whether all shape cases are computed; otherwise only those with padding and, where there is one, a cache.
        repeats_shapes: Whether shape cases are computed also by outputs for which the reference's results speak (:mod:`slipway_validate.outputs.same_code`).
        continues: Whether prompts are continued greedily.
        drafts: Whether an output is first shown the reference's continuation as a whole, and continues the prompts itself only if it chooses other tokens.
        beside_reference: Whether outputs are timed in turn with the reference; otherwise alone.
        rounds: Rounds of timing after which stable figures suffice; 0 always takes all.
        most_rounds: Largest number of rounds, whatever is requested.
        prefills: Timed passes over the prompt in a round.
        most_steps: Largest number of timed decode steps in a round, whatever is requested.
        difference: What differs from the full evidence, in words; empty for the full evidence.
    """

    most_windows: int = 1 << 30
    windows_factor: int = 1
    every_case: bool = True
    repeats_shapes: bool = False
    continues: bool = True
    drafts: bool = True
    beside_reference: bool = True
    rounds: int = 0
    most_rounds: int = 1 << 30
    prefills: int = 1
    most_steps: int = 8
    difference: str = ""


EVIDENCE: Mapping[Effort, Evidence] = {
    "quick": Evidence(
        most_windows=4,
        every_case=False,
        continues=False,
        beside_reference=False,
        rounds=3,
        difference="at most 4 windows, the padded shapes only, no continuations, and speed was not measured beside the reference",
    ),
    "standard": Evidence(rounds=3, most_rounds=5),
    "thorough": Evidence(
        windows_factor=4,
        repeats_shapes=True,
        drafts=False,
        prefills=2,
        most_steps=1 << 30,
        difference="four times the windows, every shape also where the reference speaks for it, every continuation token by token, and every round of timing was taken, with all its steps",
    ),
}
