"""Call GGUF's runtime in random orders, in a process of its own: ``python orders_of_llama_calls.py FOLDER ORDERS SEED``.

Several models are open at a time and end in any order, as in a process that runs one test after the other. The last line says how many orders
were called.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from slipway.proof.runtime import plain_step
from slipway_gguf.runtime import load
from slipway_gguf.runtime.model import GGUFModel

CONVERSATION = [{"role": "user", "content": "What is a list?"}]


def _compute(model: GGUFModel) -> None:
    logits, past = model.forward(plain_step([5, 6, 7, 8], past=None, past_length=0))
    assert np.isfinite(logits).all()
    model.forward(plain_step([9], past=past, past_length=4))


CALLS: tuple[Callable[[GGUFModel], object], ...] = (
    lambda model: model.prepare_comparison(),
    lambda model: model.leave_comparison(),
    lambda model: model.rendered(CONVERSATION),
    lambda model: model.tokens_of("a list of words"),
    _compute,
)


def call(folder: Path, orders: int, seed: int) -> int:
    """Call the functions of the runtime in random orders; return how many orders."""
    chance, models = random.Random(seed), [load(folder, threads=1)]
    for _ in range(orders):
        for _ in range(chance.randint(1, 4)):
            chance.choice(CALLS)(chance.choice(models))
        if chance.random() < 0.3:
            models.append(load(folder, threads=1))
        if len(models) > 1 and chance.random() < 0.3:
            models.pop(chance.randrange(len(models)))
            gc.collect()
    return orders


if __name__ == "__main__":
    print(call(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
