"""The base model of an export against the one the adapter says it was trained on, by name."""

from __future__ import annotations

import re

_CACHED = re.compile(r"models--[^/]+?--(?P<name>[^/]+)")  # a folder of the Hugging Face cache
_SEPARATORS = re.compile(r"[/\\]+")  # adapters are trained on Windows too


def other_base(name: str, trained: str | None) -> tuple[str, ...]:
    """A warning if an adapter was trained on a base model of another name than the one it is merged into.

    No error: names are what people and copies make of them. An adapter that does not fit the weights is refused by the
    merge; one of a sibling of the same shape (base and instruct) is not, and only its name tells.

    Args:
        name: Path, address or repository of the base model that is used. A digest has no name and is not compared.
        trained: ``base_model_name_or_path`` of the adapter's configuration.
    """
    if not trained or name.startswith("sha256:") or _last(trained) == _last(name):
        return ()
    warning = (
        f"the adapter was trained on base model {trained!r} (base_model_name_or_path in its adapter_config.json), and this "
        f"export merges it into {name!r}: if they are not the same weights, set base_model.name"
    )
    return (warning,)


def _last(name: str) -> str:
    """What is left of a path or repository without owners and folders; comparable."""
    cached = _CACHED.search(name)
    parts = [part for part in _SEPARATORS.split(name) if part not in ("", ".")]
    return (cached["name"] if cached else (parts or [""])[-1]).casefold()
