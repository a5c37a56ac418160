"""Parameters of the stages reference and validate, and what each effort of a validation computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from slipway.stage import StageParams
from slipway.validation.inputs import Effort
from slipway.validation.verdicts import LimitOverrides

BY_LAYERS = "base, adapter and PyTorch outputs that do not fit are compared layer by layer, without generated text and speed; other outputs map their files"
"""What happens where a model does not fit into memory."""


class SampleParams(StageParams):
    """Parameters that decide what every model computes; those of the reference."""

    effort: Effort = Field(default="standard", description="quick leaves evidence out, thorough adds to it")
    test_samples: int = Field(default=10, ge=1, le=10_000, description="windows of held-out text")
    sequence_length: int = Field(default=128, ge=8, le=32_768, description="tokens per window")
    longest_text: int = Field(
        default=0, ge=0, description="most tokens that each output takes; 0 for those of the model"
    )
    greedy_prompts: int = Field(default=4, ge=0, le=100, description="prompts continued greedily")
    max_new_tokens: int = Field(default=16, ge=1, le=1024, description="tokens generated for each prompt")
    continuation_tokens: int = Field(
        default=0, ge=0, le=4096, description="tokens of long greedy continuations; 0 leaves them out"
    )
    continuation_prompts: int = Field(default=1, ge=1, le=16, description="prompts continued at length")
    test_inputs: list[dict[str, Any]] = Field(
        default_factory=list, max_length=1000, description="test inputs, if there is no input of this name"
    )
    most_test_inputs: int = Field(default=100, ge=1, le=10_000, description="test inputs that are answered")
    seed: int = Field(default=0, ge=0, description="chooses the places of the windows in the text")
    max_logit_bytes: int = Field(
        default=2 << 30, ge=1 << 20, description="disk space for logits; fewer samples are used if it does not suffice"
    )
    output_timeout_seconds: float = Field(default=3600.0, gt=0, description="longest time one output may take")
    by_layers: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="compute decoders in PyTorch layer by layer; auto does so where one does not fit into memory",
    )

    @property
    def evidence(self) -> Evidence:
        """Return the evidence of the effort."""
        return EVIDENCE[self.effort]

    @property
    def windows(self) -> int:
        """Return the number of windows that the effort asks for."""
        return min(self.test_samples * self.evidence.windows_factor, self.evidence.most_windows)

    @property
    def logit_bytes(self) -> int:
        """Return the disk space for logits that the effort may take."""
        return self.max_logit_bytes * self.evidence.windows_factor

    @property
    def prompts(self) -> int:
        """Return the number of prompts that are continued."""
        return self.greedy_prompts if self.evidence.continues else 0


class ValidateParams(SampleParams):
    """Parameters of the validate stage; those of the samples are the reference's if it is an input."""

    compare_outputs: bool = Field(default=True, description="false only loads and runs the outputs")
    benchmark_performance: bool = Field(
        default=True, description="measure prefill and decode speed, alternating with the reference"
    )
    benchmark_repeats: int = Field(
        default=7, ge=1, le=1000, description="most rounds of timing, each for an output and then for the reference"
    )
    benchmark_decode_steps: int = Field(default=16, ge=1, le=4096, description="timed decode steps per round")
    benchmark_seconds: float = Field(
        default=12.0, gt=0, le=3600, description="no round of an output starts later; one round is always run"
    )
    again: tuple[str, ...] | None = Field(
        default=None,
        description="outputs to judge; the verdicts on the others are those of the report in the input before",
    )
    limits: dict[str, LimitOverrides] = Field(
        default_factory=dict,
        description="limits to replace, by type of the stored weights: one of slipway.levels.STORED_TYPES",
    )


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of one effort.

    Attributes:
        most_windows: Largest number of windows, whatever is requested.
        windows_factor: Windows, and disk for their logits, as a multiple of those requested.
        every_case: Whether all shape cases are computed; otherwise only those with padding, and with a cache if there is one.
        repeats_shapes: Whether outputs that run the reference's code compute the shape cases too (:mod:`slipway_validate.outputs`).
        continues: Whether prompts are continued greedily.
        pictures: Prompts with a picture, for a model that takes images.
        drafts: Whether an output first checks the reference's continuations as a whole, and generates its own only if it chooses other tokens.
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
    pictures: int = 4
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
        pictures=2,
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
