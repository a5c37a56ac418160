"""What validation says of a model that takes images: its results behind pictures, beside those on text alone."""

from __future__ import annotations

from slipway.texts import counted, printable
from slipway.validation.comparisons import LogitComparison
from slipway.validation.verdicts import Value, Verdict


class PictureEffect(Value):
    """What the reference computes of prompts with a picture: some text, a picture of random colours, and text again.

    Attributes:
        pictures: Number of prompts.
        tokens: Number of compared positions, all behind pictures.
        effect_kl: Mean KL(reference ‖ base) at them, nats per token; None without an adapter.
        not_run: Why there are none; empty if there are.
    """

    pictures: int = 0
    tokens: int = 0
    effect_kl: float | None = None
    not_run: str = ""

    @property
    def said(self) -> str:
        """Return one sentence for people, without its end."""
        if self.not_run:
            return f"pictures: not run ({printable(self.not_run)})"
        effect = (
            ""
            if self.effect_kl is None
            else f", behind which the adapter moves the base by a mean KL of {self.effect_kl:.2g}"
        )
        return f"pictures: {counted(self.pictures, 'prompt')} with a picture{effect}"


class PictureComparison(Value):
    """The results of an output behind pictures, compared as its results on text.

    Attributes:
        pictures: Number of prompts with a picture.
        tokens: Number of compared positions, all behind pictures.
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
        failed: Why it cannot compute pictures, though it should; empty otherwise.
        blamed: Tensors of its part for images that are shown to be others than they should be; empty if none are.
    """

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
            return f"pictures: not run ({printable(self.not_run)})"
        if self.failed:
            return f"pictures: {printable(self.failed)}"
        parts = [each.said for each in (self.faithful, self.fit) if each.said]
        return f"pictures: behind {counted(self.pictures, 'picture')}, {'; '.join(parts) or 'nothing was judged'}"
