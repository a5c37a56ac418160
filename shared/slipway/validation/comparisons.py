"""Differences between an output's results and another model's, and checks of the figures against their limits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipway.validation.verdicts import Question, Value


class Check(Value):
    """One measured value against one limit.

    Attributes:
        name: Name of the measurement, for example ``mean_kl`` or ``left_padded.max_abs_diff``.
        value: The measurement; None if it is not a finite number (the check then fails).
        limit: The limit: an upper one (``<=``) or a lower one (``>=``).
        comparison: The kind of limit.
        passed: Whether the value keeps the limit.
        against: The other side of the comparison: ``reference``, ``merged``, ``stored`` (PyTorch on the weights that the output stores), or
            ``itself`` (the same tokens computed another way, for example through the KV cache instead of in one pass).
        question: The verdict that it belongs to (``slipway.validation.verdicts``).
        unit: Unit of value and limit: ``logits``, ``nats/token``, ``share`` (0 to 1), ``ratio`` or ``count``.
    """

    name: str
    value: float | None
    limit: float
    comparison: Literal["<=", ">="]
    passed: bool
    against: Literal["reference", "merged", "stored", "itself"] = "reference"
    question: Question = "faithful"
    unit: str = ""

    def __str__(self) -> str:
        shown = "not a finite number" if self.value is None else f"{self.value:.3g}"
        return f"{self.name} (against {self.against}) is {shown}, limit {self.comparison} {self.limit:.5g}"


class LogitComparison(Value):
    """Results of an output compared with those of another model, over all positions of all windows.

    Results are either logits, compared as distributions, or values (an embedding, a score). Figures that do not apply are None.

    Attributes:
        tokens: Number of compared positions.
        max_abs_diff: Largest absolute difference of a logit or value.
        mean_abs_diff: Mean absolute difference over all of them.
        mean_kl: Mean over positions of KL(other ‖ output) between the distributions given by the logits, nats per position.
        max_kl: Largest of them.
        kl_quantiles: Quantiles of the per-position KL by name: ``p50``, ``p90``, ``p99``.
        kl_per_window: Mean KL of each window, in window order (for plots).
        kl_by_position: Mean KL over all windows by position in the window, in at most 32 equal parts from its begin to its end; empty below
            8 positions.
        top1_agreement: Share of positions where both rank the same token, class or place first, 0 to 1.
        choice_agreement: The same, but a choice also counts as equal if the other model finds it as likely as its own, to within 0.05.
        cosine_distance: Mean over positions of 1 - cos between the two embeddings, 0 (alike) to 2.
        max_cosine_distance: Largest of them.
        relative_error: Root of the summed squared differences, divided by the same root of the other model's values.
    """

    tokens: int
    max_abs_diff: float | None
    mean_abs_diff: float | None
    mean_kl: float | None = None
    max_kl: float | None = None
    kl_quantiles: dict[str, float | None] = Field(default_factory=dict)
    kl_per_window: tuple[float | None, ...] = ()
    kl_by_position: tuple[float | None, ...] = ()
    top1_agreement: float | None = None
    choice_agreement: float | None = None
    cosine_distance: float | None = None
    max_cosine_distance: float | None = None
    relative_error: float | None = None


class ShapeCase(Value):
    """The same tokens computed in another shape, such as padded on the left or through the KV cache.

    Attributes:
        name: ``left_padded``, ``right_padded``, ``batch`` (of inputs that have one length only), ``single_token``, ``decode`` (prefill,
            then one token at a time with the KV cache), ``decode_left_padded``, ``decode_right_padded``, ``decode_batch``, ``chunked``
            (prefill, then several tokens at once), ``native_dtype`` (a padded batch in the data type in which the output is served,
            if logits are otherwise compared in float32).
        batch: Number of rows.
        tokens: Number of compared positions, without padding.
        max_abs_diff: Largest difference from the reference's logits at the same positions.
        mean_kl: Mean KL against the reference, nats per token.
        self_max_abs_diff: Largest difference from the output's own logits in one plain pass over the window, or over each row alone.
        self_mean_kl: Mean KL against the same logits of the output, nats per token.
        relative_error: Relative error of values that are not logits, against the reference.
        self_relative_error: The same against the output's own values.
        skipped: Why the case does not apply to this output; empty if it ran.
    """

    name: str
    batch: int = 0
    tokens: int = 0
    max_abs_diff: float | None = None
    mean_kl: float | None = None
    self_max_abs_diff: float | None = None
    self_mean_kl: float | None = None
    relative_error: float | None = None
    self_relative_error: float | None = None
    skipped: str = ""


class GreedyComparison(Value):
    """Greedy continuations (always the most likely token, with KV cache) against the reference's.

    Attributes:
        prompts: Number of prompts.
        new_tokens: Number of tokens generated for each.
        exact_match_share: Share of prompts whose whole continuation equals the reference's, 0 to 1.
        mean_common_prefix: Mean number of tokens before the first difference.
        example_prompt: Text of the first prompt.
        example_reference: Text of the first continuation by the reference.
        example_output: Text of the first continuation by this output.
    """

    prompts: int
    new_tokens: int
    exact_match_share: float
    mean_common_prefix: float
    example_prompt: str = ""
    example_reference: str = ""
    example_output: str = ""
