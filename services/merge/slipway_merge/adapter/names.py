"""Map the adapter's names to the base's tensors by the existing tensors, without a table of architectures.

An adapter uses the names of the trained model class (``model.layers.0.q_proj``); a base file may have been saved from the bare model
(``layers.0.q_proj``), or the other way round. One prefix, the same for all tensors, explains the difference. An adapter that was trained on
the text model alone fits its vision-language model too, which has a part more in its names (``model.language_model.layers.0.q_proj``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from slipway.errors import ModelMergeError
from slipway.model.adapters.refusals import misfit

_MOST_PREFIXES = 64
"""Most prefixes to try; models have a handful."""
_TEXT_PARTS = frozenset({"language_model", "text_model"})
"""Names of the text model within a model that takes more than text."""


@dataclass(frozen=True)
class NameMap:
    """Names in the trained model ↔ names in the base's files: remove ``strip``, then add ``add``; one of them is empty, unless the names are those
    of the text model within the base.

    ``renamed`` has the stored names of weights that transformers has, or had, under another name.
    """

    names: frozenset[str]
    strip: str = ""
    add: str = ""
    renamed: dict[str, str] = field(default_factory=dict, hash=False)

    def stored(self, name: str) -> str | None:
        """Return the base tensor for a name of the trained model, or None."""
        if name in self.names:
            return name
        if name in self.renamed:
            return self.renamed[name]
        if not name.startswith(self.strip):
            return None
        candidate = self.add + name.removeprefix(self.strip)
        return candidate if candidate in self.names else None

    def modelled(self, stored: str) -> str:
        """Return the trained model's name for a base tensor (the stored name if the prefixes agree)."""
        if stored in self._originals:
            return self._originals[stored]
        if stored.startswith(self.add) and (self.strip or self.add):
            return self.strip + stored.removeprefix(self.add)
        return stored

    def is_trained(self, stored: str) -> bool:
        """Return whether a base tensor may be of the trained model: where that is the text model within the base, no other part is."""
        return stored.startswith(self.add) or not _TEXT_PARTS & set(self.add.split("."))

    @cached_property
    def _originals(self) -> dict[str, str]:
        """The first of several names for a stored tensor, which is the current one."""
        return {stored: name for name, stored in reversed(self.renamed.items())}


def fit_names(wanted: Iterable[str], stored: Iterable[str]) -> NameMap:
    """Find the prefix that makes most of the wanted names base tensors; none if they already are.

    A prefix is only removed or added, and has no layer number, so an encoder's adapter cannot be applied to a decoder, nor one layer's to
    another. It is exchanged only for one with the text model's part behind it (``model.`` for ``model.language_model.``).

    Raises:
        ModelMergeError: ``ADAPTER_BASE_MISMATCH`` if two prefixes explain the names equally well.
    """
    names = frozenset(stored)
    unresolved = sorted(name for name in set(wanted) if name not in names)
    candidates = sorted(_candidates(unresolved, names))
    if len(candidates) > _MOST_PREFIXES:
        raise _ambiguous(unresolved[0], candidates[:3])
    counts = {
        (strip, add): sum(NameMap(names, strip, add).stored(name) is not None for name in unresolved)
        for strip, add in candidates
    }
    if not counts:
        return NameMap(names)
    best = max(counts.values())
    winners = [pair for pair, count in counts.items() if count == best]
    if len(winners) > 1:
        raise _ambiguous(unresolved[0], winners)
    return NameMap(names, *winners[0])


def _ambiguous(name: str, prefixes: Sequence[tuple[str, str]]) -> ModelMergeError:
    shown = ", ".join(repr(add) if add else f"without {strip!r}" for strip, add in prefixes)
    return misfit(f"adapter tensor {name!r} fits base tensors under several prefixes ({shown})", tensor=name)


def _candidates(unresolved: list[str], names: frozenset[str]) -> set[tuple[str, str]]:
    found = set()
    for name in unresolved[:64]:
        parts = name.split(".")
        for cut in range(1, len(parts) - 2):
            prefix = parts[:cut]
            if not any(part.isdigit() for part in prefix) and ".".join(parts[cut:]) in names:
                found.add((f"{'.'.join(prefix)}.", ""))
        if len(parts) < 3:
            continue
        rest = f".{'.'.join(parts[1:])}"
        for part in _TEXT_PARTS:
            if f"{parts[0]}.{part}{rest}" in names:
                found.add((f"{parts[0]}.", f"{parts[0]}.{part}."))
        for stored in names:
            prefix = stored.removesuffix(f".{name}").split(".")
            if stored.endswith(f".{name}") and not any(part.isdigit() for part in prefix):
                found.add(("", f"{'.'.join(prefix)}."))
    return found
