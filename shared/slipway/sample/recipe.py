"""Sizes, step counts and learning rates of the sample, in one place."""

from __future__ import annotations

from dataclasses import dataclass

_WARMUP_STEPS = 10


@dataclass(frozen=True, slots=True)
class AdapterRecipe:
    """How a LoRA is trained.

    Attributes:
        rank: LoRA rank.
        alpha: LoRA alpha.
        steps: Optimizer steps.
        batch: Samples of one step.
        learning_rate: Peak learning rate.
        schedule: How it falls, in the Trainer's words.
        warmup_steps: Steps in which it rises.
        save_steps: Steps between two checkpoints.
    """

    rank: int
    alpha: int
    steps: int
    batch: int
    learning_rate: float
    save_steps: int
    schedule: str = "linear"
    warmup_steps: int = 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training recipe. The default one takes about a minute on two cores.

    Attributes:
        vocab_size: Tokens of the byte-level BPE, its three special tokens included.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP.
        layers: Decoder layers.
        heads: Query heads. ``heads × head_dim`` differs from ``hidden_size`` on purpose, as in the real Qwen3.
        kv_heads: Key and value heads.
        head_dim: Width of one head.
        max_positions: Longest sequence the configuration promises.
        batch: Sequences of one optimizer step.
        sequence: Tokens of one training sequence.
        base_steps: Optimizer steps of the base model.
        base_learning_rate: Its peak learning rate.
        embedding_learning_rate: The same for its embedding: most tokens are rare, so their rows get few
            steps. A higher rate learns more, but gives an embedding that 4 bits represent less well.
        adapter_steps: Optimizer steps of the adapter.
        adapter_learning_rate: Its peak learning rate.
        save_steps: Steps between two checkpoints of the adapter.
        rank: LoRA rank.
        alpha: LoRA alpha; differs from the rank so that a wrong scaling shows.
    """

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 1024
    batch: int = 4
    sequence: int = 128
    base_steps: int = 400
    base_learning_rate: float = 1e-3
    embedding_learning_rate: float = 4e-3
    adapter_steps: int = 150
    adapter_learning_rate: float = 5e-3
    save_steps: int = 50
    rank: int = 8
    alpha: int = 12

    @property
    def adapter(self) -> AdapterRecipe:
        """Return what the training of the adapter needs."""
        return AdapterRecipe(
            rank=self.rank,
            alpha=self.alpha,
            steps=self.adapter_steps,
            batch=self.batch,
            learning_rate=self.adapter_learning_rate,
            save_steps=self.save_steps,
            warmup_steps=_WARMUP_STEPS,
        )
