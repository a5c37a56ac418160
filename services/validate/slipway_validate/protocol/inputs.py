"""What a model is asked beside the samples, as files beside them: the user's test inputs, or one prompt; and what it answers."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

INPUTS_FILE = "inputs.json"
"""In the folder of the samples: :class:`EncodedInputs`; missing if the user gave none."""
SOUNDS_FILE = "sounds.npy"
"""There too, the sounds of a speech model's test inputs: features (inputs, F, frames), or samples (inputs, S) with NaN behind the end; float32."""
ANSWERED_FILE = "answered.json"
"""In the folder of a run that only answers a prompt: :class:`Answered`."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EncodedInput(_Message):
    """One of the user's test inputs.

    Attributes:
        ids: Tokens of the text; for an encoder–decoder, of its source; for a speech model, the first tokens of its decoder.
        second: Tokens of the text that it is compared with.
        most: Most tokens of the answer.
        keep: Places of the tokens that answer: the first of each word (-1 where it was cut off), those of the context.
        offsets: Begin and end of each of these tokens in the context, in characters.
    """

    ids: tuple[int, ...]
    second: tuple[int, ...] = ()
    most: int = 0
    keep: tuple[int, ...] = ()
    offsets: tuple[tuple[int, int], ...] = ()


class EncodedInputs(_Message):
    """Contents of INPUTS_FILE in the samples' folder.

    Attributes:
        inputs: The test inputs.
        stops: Tokens that end an answer.
        start: First tokens of a decoder with an encoder.
        banned: Tokens that no answer has.
        banned_first: Tokens with which no answer begins.
    """

    inputs: tuple[EncodedInput, ...]
    stops: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    banned_first: tuple[int, ...] = ()


class Answers(_Message):
    """A model's answers to the test inputs: for each, numbers as :mod:`slipway_validate.runner.generation.generating` returns them; or why there are none."""

    answers: tuple[tuple[float, ...], ...] = ()
    skipped: str = ""


class PromptSpec(_Message):
    """A prompt to turn into tokens.

    Attributes:
        tokenizer: Folder with the tokenizer.
        model: Folder with the model's ``config.json``.
        family: Name of its family.
        prompt: The prompt.
        chat: Whether the model's chat template is applied, if it has one.
        most: Most tokens of the answer.
        samples: New folder for INPUTS_FILE, and the tokenizer as one file.
    """

    tokenizer: Path
    model: Path
    family: str
    prompt: str
    chat: bool
    most: int
    samples: Path


class PromptAnswer(_Message):
    """A model's answer to a prompt.

    Attributes:
        tokens: Its tokens; the one that ends it is not among them.
        ended: Whether the model ended it; otherwise it has as many tokens as were allowed.
        first_seconds: Time until the first token was chosen, most of which the prompt takes.
        seconds: Time until the last one was.
        steps: Number of tokens that were chosen after the first.
    """

    tokens: tuple[int, ...]
    ended: bool
    first_seconds: float
    seconds: float
    steps: int


class Answered(_Message):
    """The answers of the models of a run, by name."""

    answers: dict[str, PromptAnswer]
