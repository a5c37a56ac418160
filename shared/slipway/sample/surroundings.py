"""State of this process while a sample is made: threads, kernels, progress bars and the model hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slipway.machine.cgroup import usable_cores
from slipway.machine.environment import variable_set
from slipway.machine.threads import sleeping_threads

# Two threads on any machine with two cores: the order of summation, and with it the weights, depend on their number.
_THREADS = 2


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
        with variable_set("HF_HUB_OFFLINE", "1"):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()
