"""Adapters whose tensors have other names than peft looks for: it would leave them out without an error.

Compiled or wrapped models, other tools and other versions of transformers save under other prefixes. The names are matched by
their ends here, on their own and not by what the merge made of them: a reference takes nothing over from what it is compared with.
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
from slipway_validate.runner.model import Unusable

Shapes = Mapping[str, tuple[int, ...]]


def take_all(module: Any, adapter: Path) -> None:
    """Put tensors that peft has left out where they belong.

    Args:
        module: The model with the adapter, as ``PeftModel.from_pretrained`` made it.
        adapter: The adapter's folder.

    Raises:
        Unusable: It cannot be told where.
    """
    saved = load_peft_weights(str(adapter), device="cpu")
    if not set_peft_model_state_dict(module, dict(saved)).unexpected_keys:
        return
    wanted = get_peft_model_state_dict(module, save_embedding_layers=False)
    whole = get_peft_model_state_dict(module, save_embedding_layers=True)  # those of embeddings may be saved, or not
    places = {name: tuple(tensor.shape) for name, tensor in sorted({**whole, **wanted}.items()) if name not in saved}
    left_out = {name: tuple(saved[name].shape) for name in sorted(set(saved) - set(wanted) - set(whole))}
    empty = sorted(set(wanted) - set(saved))
    found = match(left_out, places)
    if not set(empty) <= set(found.values()):
        raise Unusable(
            f"peft leaves out {counted(len(left_out), 'tensor')} of the adapter {adapter.name!r}, first {min(left_out)!r}: "
            f"their names do not say where they belong; it looks for {min(set(empty) - set(found.values()))!r}"
        )
    set_peft_model_state_dict(module, {found.get(name, name): tensor for name, tensor in saved.items()})


def match(left_out: Shapes, empty: Shapes) -> dict[str, str]:
    """Which name is meant by which: the one of equal shape that ends alike the furthest, where that is one alone.

    The longest ends are matched first, so that what is left to choose from for the others is not what surely is another's.
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
    """From the first number of a layer on, or, where there is none, from the module on."""
    parts = name.split(".")
    module = len(parts) - (3 if parts[-2].startswith("lora_") else 2)
    return ".".join(parts[next((index for index, part in enumerate(parts) if part.isdigit()), module) :])


def _alike(name: str, other: str) -> int:
    """How many parts at the end are the same."""
    parts = zip(name.split(".")[::-1], other.split(".")[::-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], parts))
