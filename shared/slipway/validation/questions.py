"""Answers of several models to one prompt: base, fine-tuned model and outputs, side by side. They judge nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from slipway.files.regular_file import read_regular
from slipway.validation.verdicts import Value

FILE_NAME = "answers.json"
BASE: Final = "base"
FINE_TUNED: Final = "fine-tuned"
"""Names of the base model, and of base + adapter, beside those of outputs."""
MOST_CHARACTERS, MOST_TOKENS = 20_000, 1024
"""Most characters of a prompt and of a shown text; most tokens of an answer."""
_LARGEST = 16 << 20


class ModelAnswer(Value):
    """The answer of one model.

    Attributes:
        name: :data:`BASE`, :data:`FINE_TUNED` or the name of an output.
        status: ``done``; ``not_run`` if this machine, or the runtime, cannot run the model; ``failed`` if it cannot be used.
        reason: Reason of a failure, a key of ``slipway.reasons.REASONS``.
        message: Why there is no answer.
        text: The answer; a long one is shortened.
        tokens: Its tokens.
        ended: Whether the model ended it; otherwise it has as many tokens as were allowed.
        first_seconds: Time until the first token, most of which the prompt takes.
        tokens_per_second: Speed after the first token; None if there is no other.
        load_seconds: Time that loading the model took.
        runtime: The runtime.
        device: The device: ``cpu``, or the GPU's name.
        computed: Data type in which the answer was computed.
    """

    name: str
    status: Literal["done", "not_run", "failed"] = "done"
    reason: str = ""
    message: str = ""
    text: str = ""
    tokens: tuple[int, ...] = ()
    ended: bool = False
    first_seconds: float | None = None
    tokens_per_second: float | None = None
    load_seconds: float | None = None
    runtime: str = ""
    device: str = ""
    computed: str = ""


class AnswerReport(Value):
    """The answers to one prompt.

    Attributes:
        schema_version: Raised when a field changes its meaning.
        prompt_tokens: Number of tokens that each model read.
        read: Their text, as a chat template made it; a long one is shortened.
        reference: The model whose answer the others are compared with, if it was asked: the fine-tuned one, or the base of an export without an
            adapter.
        answers: The answers.
    """

    schema_version: Literal[1] = 1
    prompt_tokens: int
    read: str = ""
    reference: str = FINE_TUNED
    answers: tuple[ModelAnswer, ...] = ()

    def first_difference(self, answer: ModelAnswer) -> int | None:
        """Return the number of the first token, from 1, that differs from the reference's; 0 if none does, None without a comparison."""
        wanted = next((each for each in self.answers if each.name == self.reference and each.status == "done"), None)
        if wanted is None or answer.status != "done" or answer.name == self.reference:
            return None
        if answer.tokens == wanted.tokens:
            return 0
        pairs = enumerate(zip(answer.tokens, wanted.tokens, strict=False), 1)
        shared = min(len(answer.tokens), len(wanted.tokens))
        return next((number for number, (own, theirs) in pairs if own != theirs), shared + 1)

    def write(self, folder: Path) -> None:
        """Write ``answers.json`` into a folder."""
        (folder / FILE_NAME).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read_from(cls, folder: Path) -> AnswerReport:
        """Read the answers in a folder.

        Raises:
            OSError: The folder has no ``answers.json``, or it is not a regular file of a sensible size.
            pydantic.ValidationError: The file is not a report of this schema.
        """
        return cls.model_validate_json(read_regular(folder / FILE_NAME, largest=_LARGEST))
