"""Load adapter tensors with other names than peft expects, which it would ignore without an error.

Compiled or wrapped models, other tools and other versions of transformers save under other prefixes. This module matches the
names by their ends. It does not reuse the merge's matching: the reference must be independent of the outputs compared with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import load_peft_weights

from slipway.counts import counted
from slipway_validate.runner.model import UnplacedTensors

Shapes = Mapping[str, tuple[int, ...]]


def load_ignored_tensors(module: Any, adapter: Path) -> None:
    """Load the adapter's tensors that peft ignored into their places.

    Args:
        module: The model with the adapter, from ``PeftModel.from_pretrained``.
        adapter: The adapter's folder.

    Raises:
        UnplacedTensors: Their places cannot be determined.
    """
    saved = load_peft_weights(str(adapter), device="cpu")
    if not set_peft_model_state_dict(module, dict(saved)).unexpected_keys:
        return
    wanted = get_peft_model_state_dict(module, save_embedding_layers=False)
    # An adapter may or may not have those of embeddings.
    whole = get_peft_model_state_dict(module, save_embedding_layers=True)
    places = {name: tuple(tensor.shape) for name, tensor in sorted({**whole, **wanted}.items()) if name not in saved}
    left_out = {name: tuple(saved[name].shape) for name in sorted(set(saved) - set(wanted) - set(whole))}
    empty = sorted(set(wanted) - set(saved))
    found = match_names(left_out, places)
    if not set(empty) <= set(found.values()):
        raise UnplacedTensors(
            f"peft ignores {counted(len(left_out), 'tensor')} of the adapter {adapter.name!r}, first {min(left_out)!r}: "
            f"their places cannot be determined by their names; peft expects {min(set(empty) - set(found.values()))!r}"
        )
    set_peft_model_state_dict(module, {found.get(name, name): tensor for name, tensor in saved.items()})


def match_names(left_out: Shapes, empty: Shapes) -> dict[str, str]:
    """Match each name to the one of equal shape with the longest common end, if there is exactly one.

    The longest common ends are matched first, so that their names are no longer candidates for the others.
    """
    by_end: dict[str, list[str]] = {}
    for name in empty:
        by_end.setdefault(_end(name), []).append(name)
    pairs = [
        (_alike(name, other), name, other)
        for name in left_out
        for other in by_end.get(_end(name), ())
        if left_out[name] == empty[other]
    ]
    found: dict[str, str] = {}
    for length in sorted({pair[0] for pair in pairs}, reverse=True):
        taken = set(found.values())
        free = [(name, other) for at, name, other in pairs if at == length and name not in found and other not in taken]
        names, others = Counter(name for name, _ in free), Counter(other for _, other in free)
        found |= {name: other for name, other in free if names[name] == others[other] == 1}
    return found


def _end(name: str) -> str:
    """Return the end of a name from its first layer number; without one, from the module."""
    parts = name.split(".")
    module = len(parts) - (3 if parts[-2].startswith("lora_") else 2)
    return ".".join(parts[next((index for index, part in enumerate(parts) if part.isdigit()), module) :])


def _alike(name: str, other: str) -> int:
    """Return the number of equal parts at the end of two names."""
    parts = zip(name.split(".")[::-1], other.split(".")[::-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], parts))
