"""What tests know of an architecture that is written as GGUF: how a tiny model of it is made, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers as tf

from support.models.gguf_sizes import SIZES

EXACT = 2e-5
"""Largest difference of a log probability between llama.cpp and transformers."""
LONG_SUMS = 6e-5
"""The same where recurrent layers add up all tokens, which transformers does in chunks and llama.cpp one by one, in another order."""
BY_TABLE = 5e-3
"""The same where llama.cpp looks GELU up in a table of float16: a value at the edge of two entries may get the other one."""
OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Layers that experts name like others, which peft takes for parameters."""
LATENT_LAYERS = ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")
"""Layers of latent vectors, which llama.cpp computes without an adapter's factors."""
OTHER_PARTS = ("visual", "vision_tower", "multi_modal_projector")
"""Parts that take images."""


@dataclass(frozen=True)
class Family:
    """A tiny model of an architecture.

    Attributes:
        make: Makes it.
        refused: Settings that llama.cpp computes otherwise, each with the setting that the refusal names.
        taken: Settings that it computes, beside the model's own.
        untrained: Parts of the names of layers that an adapter leaves alone.
        most: Largest difference of a log probability from that of transformers.
        fast: Whether every run of the tests has it, as the quickest witness of a mechanism.
    """

    make: Callable[[], Any]
    refused: tuple[tuple[Mapping[str, Any], str], ...] = ()
    taken: tuple[Mapping[str, Any], ...] = ()
    untrained: tuple[str, ...] = ()
    most: float = EXACT
    fast: bool = False


def of(config: str, model: str, **more: Any) -> Callable[[], Any]:
    """Return a function that makes a model of these classes of transformers."""
    return lambda: getattr(tf, model)(getattr(tf, config)(**{**SIZES, **more}))


def of_parts(name: str, text: dict[str, Any], vision: dict[str, Any] | None) -> Callable[[], Any]:
    """Return a function that makes a model with parts for text and images."""

    def make() -> Any:
        config = getattr(tf, f"{name}Config")(text_config={**SIZES, **text}, vision_config=vision)
        return getattr(tf, f"{name}ForConditionalGeneration")(config)

    return make
