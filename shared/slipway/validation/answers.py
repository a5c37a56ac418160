"""Results of long continuations, and of the user's own test inputs, beside the reference's."""

from __future__ import annotations

from slipway.validation.verdicts import Value


class LongContinuation(Value):
    """Long greedy continuations through the KV cache, where faults that build up or begin late show.

    Each prompt is continued by the output alone, and the reference's continuation is computed by both in one pass.

    Attributes:
        prompts: Number of prompts.
        new_tokens: Number of tokens generated for each.
        same_tokens: Mean number of tokens before the first that the reference chooses otherwise.
        mean_kl: Mean KL(reference ‖ output) over the tokens of the reference's continuations, nats per token.
        kl_by_position: The same by position, in at most 32 equal parts.
        top1_agreement: Share of these tokens that the output would choose too.
        cache_kl: Mean KL, in that part of the output's own continuation where it is largest, of its logits through the cache against those
            of one pass over the same text, nats per token: the cache goes wrong there if it is large.
        repetition: Share of the output's groups of four tokens that it has already written before in the same continuation.
        reference_repetition: The same of the reference.
        skipped: Why there are none; empty if there are.
        example_reference: Text of the first continuation by the reference.
        example_output: Text of the first continuation by this output.
    """

    prompts: int = 0
    new_tokens: int = 0
    same_tokens: float | None = None
    mean_kl: float | None = None
    kl_by_position: tuple[float | None, ...] = ()
    top1_agreement: float | None = None
    cache_kl: float | None = None
    repetition: float | None = None
    reference_repetition: float | None = None
    skipped: str = ""
    example_reference: str = ""
    example_output: str = ""


ERROR_RATES = ("wer", "cer")
"""Scores of which less is better."""


class Score(Value):
    """One score of the answers to the test inputs.

    Attributes:
        name: ``as_expected``, ``accuracy``, ``f1``, ``exact_match``, ``bleu``, ``chrf``, ``pearson`` or ``spearman``; ``wer`` or ``cer``, the error rates of words and characters.
        value: The output's score, as a share (0 to 1; BLEU and chrF are divided by 100; error rates may exceed 1), a correlation from -1 to 1.
        reference: The reference's score.
    """

    name: str
    value: float | None
    reference: float | None

    @property
    def loss(self) -> float | None:
        """Return by how much the output is worse than the reference; negative if it is better, None if unknown."""
        if self.value is None or self.reference is None:
            return None
        loss = self.reference - self.value
        return -loss if self.name in ERROR_RATES else loss


class AnswerExample(Value):
    """One test input with the answers to it; each is shortened.

    Attributes:
        input: The input.
        expected: The expected answer; empty if there is none.
        reference: The reference's answer.
        output: The output's answer.
    """

    input: str
    expected: str = ""
    reference: str = ""
    output: str = ""


class AnswerComparison(Value):
    """The output's answers to the user's own test inputs.

    Attributes:
        inputs: Number of answered inputs.
        with_expected: How many of them have an expected answer or label.
        agreement: Share of answers that equal the reference's.
        scores: Scores against the expected answers; the first decides, the others are information.
        not_run: Scores that could not be computed here, with what to install.
        examples: Some inputs, those whose answer differs from the reference's first.
        skipped: Why the inputs were not answered; empty if they were.
    """

    inputs: int = 0
    with_expected: int = 0
    agreement: float | None = None
    scores: tuple[Score, ...] = ()
    not_run: tuple[str, ...] = ()
    examples: tuple[AnswerExample, ...] = ()
    skipped: str = ""
