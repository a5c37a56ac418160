"""Run both trainings in order, repeatably and without network access."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from slipway.sample.adapter import train_adapter
from slipway.sample.base import perplexity, train_base
from slipway.sample.corpus import Corpus
from slipway.sample.recipe import Recipe
from slipway.sample.surroundings import deterministic, quiet_and_offline, training_threads
from slipway.sample.tokenizer import token_stream, train_tokenizer
from slipway.stage import Progress

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

BASE = "qwen3-base"
RUN = "qwen3-finetuned"

# Perplexity is measured on this many windows spread over the text; the whole text would take too long.
_MEASURED_WINDOWS = 64


class Measured(BaseModel):
    """Figures of the trained sample.

    Attributes:
        parameters: Weights of the base model, tied ones counted once.
        base_documentation_perplexity: The base model on documentation it was not trained on; None if it came trained.
        base_perplexity: The base model on the held-out text of the adapter's domain.
        adapter_perplexity: The base model with its adapter on the same text.
    """

    model_config = ConfigDict(frozen=True)

    parameters: int
    base_documentation_perplexity: float | None = None
    base_perplexity: float
    adapter_perplexity: float


def train(
    folder: Path,
    english: Corpus,
    *,
    python: Corpus,
    recipe: Recipe,
    seed: int,
    threads: int | None,
    on_progress: Callable[[Progress], None],
) -> Measured:
    """Train base and adapter and save them in ``folder``.

    Args:
        folder: Receives ``qwen3-base/`` and ``qwen3-finetuned/``.
        english: Text for tokenizer and base.
        python: Text for the adapter.
        recipe: Sizes and steps.
        seed: Seed of all weights and orders.
        threads: Threads; by default two, or one on a single core.
        on_progress: Called after every step.
    """

    def measured(model: Qwen3ForCausalLM, texts: tuple[str, ...]) -> float:
        stream = token_stream(tokenizer, texts)
        return perplexity(model, stream, sequence=recipe.sequence, windows=_MEASURED_WINDOWS)

    def steps(phase: str, total: int) -> Callable[[int], None]:
        return lambda done: on_progress(Progress(phase=phase, done=done, total=total, unit="steps"))

    with deterministic(training_threads(threads)), quiet_and_offline():
        tokenizer = train_tokenizer(english.training, vocab_size=recipe.vocab_size, max_length=recipe.max_positions)
        base = train_base(
            tokenizer,
            token_stream(tokenizer, english.training),
            recipe=recipe,
            seed=seed,
            on_step=steps("base", recipe.base_steps),
        )
        base.save_pretrained(folder / BASE)
        tokenizer.save_pretrained(folder / BASE)
        parameters = base.num_parameters()
        on_english, before = measured(base, english.heldout), measured(base, python.heldout)
        adapted = train_adapter(
            base,
            tokenizer,
            _samples(token_stream(tokenizer, python.training), sequence=recipe.sequence),
            base_name=BASE,
            folder=folder / RUN,
            recipe=recipe.adapter,
            seed=seed,
            on_step=steps("adapter", recipe.adapter_steps),
        )
        after = measured(adapted, python.heldout)
    return Measured(
        parameters=parameters,
        base_documentation_perplexity=on_english,
        base_perplexity=before,
        adapter_perplexity=after,
    )


def _samples(stream: Sequence[int], *, sequence: int) -> list[dict[str, list[int]]]:
    """Cut the stream into training samples of consecutive windows; drop the remainder."""
    starts = range(0, len(stream) - sequence + 1, sequence)
    windows = (list(stream[start : start + sequence]) for start in starts)
    return [{"input_ids": ids, "labels": ids, "attention_mask": [1] * sequence} for ids in windows]
