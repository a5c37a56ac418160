"""What validation says of a model that takes images or sound: its results behind pictures or sound, beside those on text alone."""

from __future__ import annotations

from enum import StrEnum

from slipway.texts import counted, printable
from slipway.validation.comparisons import LogitComparison
from slipway.validation.verdicts import Value, Verdict


class Sense(StrEnum):
    """What a prompt has beside text. The value is its name in texts, folders, names of checks, and fields of a report."""

    PICTURES = "pictures"
    SOUND = "sound"

    @property
    def one(self) -> str:
        """Return the name of one of them."""
        return self.value.removesuffix("s")

    @property
    def beside(self) -> str:
        """Return what a prompt has beside text, as one says it of a prompt."""
        return "a picture" if self is Sense.PICTURES else self.value

    @property
    def place(self) -> str:
        """Return where results are compared."""
        return f"behind {self.value}"


class PictureEffect(Value):
    """What the reference computes of prompts with a picture or sound: some text, a picture of random colours, and text again.

    Attributes:
        sense: What the prompts have beside text.
        pictures: Number of prompts.
        tokens: Number of compared positions, all behind pictures.
        effect_kl: Mean KL(reference ‖ base) at them, nats per token; None without an adapter.
        not_run: Why there are none; empty if there are.
    """

    sense: Sense = Sense.PICTURES
    pictures: int = 0
    tokens: int = 0
    effect_kl: float | None = None
    not_run: str = ""

    @property
    def said(self) -> str:
        """Return one sentence for people, without its end."""
        if self.not_run:
            return f"{self.sense}: not run ({printable(self.not_run)})"
        effect = (
            ""
            if self.effect_kl is None
            else f", behind which the adapter moves the base by a mean KL of {self.effect_kl:.2g}"
        )
        return f"{self.sense}: {counted(self.pictures, 'prompt')} with {self.sense.beside}{effect}"


class PictureComparison(Value):
    """The results of an output behind pictures or sound, compared as its results on text.

    Attributes:
        sense: What the prompts have beside text.
        pictures: Number of prompts with a picture or sound.
        tokens: Number of compared positions, all behind pictures or sound.
        to_reference: Results compared with the reference.
        to_merged: Results compared with the merged model; None for the merged model itself, or if it is not an output.
        to_stored: Results compared with PyTorch on the weights that the output stores; None if they were not read.
        to_base: Results compared with the base without adapter; None without an adapter.
        adapter_strength: Share of the adapter's effect that the output shows.
        kept: Share of the fine-tune that is left, 0 to 1; None without an adapter, or if that was not measured.
        level_cost: Distance from the reference of the same merged weights rounded to the nearest of this level; None if that is not known.
        faithful: Whether it computes what its own weights say.
        fit: Whether enough of the fine-tune is left.
        not_run: Why nothing was compared, though nothing is known to be wrong; empty otherwise.
        failed: Why it cannot compute pictures or sound, though it should; empty otherwise.
        blamed: Tensors of its part for images or sound that are shown to be others than they should be; empty if none are.
    """

    sense: Sense = Sense.PICTURES
    pictures: int = 0
    tokens: int = 0
    to_reference: LogitComparison | None = None
    to_merged: LogitComparison | None = None
    to_stored: LogitComparison | None = None
    to_base: LogitComparison | None = None
    adapter_strength: float | None = None
    kept: float | None = None
    level_cost: float | None = None
    faithful: Verdict = Verdict()
    fit: Verdict = Verdict()
    not_run: str = ""
    failed: str = ""
    blamed: str = ""

    @property
    def said(self) -> str:
        """Return one sentence for people, without its end."""
        if self.not_run:
            return f"{self.sense}: not run ({printable(self.not_run)})"
        if self.failed:
            return f"{self.sense}: {printable(self.failed)}"
        parts = [each.said for each in (self.faithful, self.fit) if each.said]
        return (
            f"{self.sense}: behind {counted(self.pictures, self.sense.one)}, {'; '.join(parts) or 'nothing was judged'}"
        )
