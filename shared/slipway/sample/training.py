"""Run both trainings in order, repeatably and without network access: threads, kernels, progress bars and the model hub are set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from slipway.machine.cgroup import usable_cores
from slipway.machine.processes import set_variable, sleeping_threads
from slipway.sample.corpus import Corpus
from slipway.sample.models import perplexity, token_stream, train_adapter, train_base, train_tokenizer
from slipway.sample.recipe import Recipe
from slipway.stage import Progress

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


BASE = "qwen3-base"
RUN = "qwen3-finetuned"

# Perplexity is measured on this many windows spread over the text; the whole text would take too long.
_MEASURED_WINDOWS = 64

# Two threads on any machine with two cores: the order of summation, and with it the weights, depend on their number.
_THREADS = 2


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

    def measure(model: Qwen3ForCausalLM, texts: tuple[str, ...]) -> float:
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
        on_english, before = measure(base, english.heldout), measure(base, python.heldout)
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
        after = measure(adapted, python.heldout)
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


def training_threads(asked: int | None) -> int:
    """Return the number of threads to train with: those asked for, or two, or one on a single core."""
    return asked or min(_THREADS, usable_cores())


@contextmanager
def deterministic(threads: int) -> Iterator[None]:
    """Use a fixed number of threads and deterministic kernels within the block; restore settings and random state afterwards."""
    with sleeping_threads():
        import torch

    threads_before = torch.get_num_threads()
    deterministic_before = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic_before)
        torch.set_num_threads(threads_before)


@contextmanager
def quiet_and_offline() -> Iterator[None]:
    """Keep peft, which reads this variable on every save, from asking the hub for a base model of the sample's name.

    Turn progress bars off too, because the caller gets the progress.
    """
    from transformers.utils import logging  # imported first, so that it reads its environment before we change it

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with set_variable("HF_HUB_OFFLINE", "1"):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()
