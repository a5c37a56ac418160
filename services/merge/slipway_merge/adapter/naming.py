"""Translate names of weights between the adapter, the base's files, and today's transformers model.

The adapter's names are mapped by the existing tensors, without a table of architectures. An adapter uses the names of the
trained class (``model.layers.0.q_proj``); a base file may have been saved from the bare model (``layers.0.q_proj``), or the
other way round. One prefix, the same for all tensors, explains the difference. An adapter that was trained on the text model
alone fits its vision-language model too, whose names have one more part (``model.language_model.layers.0.q_proj``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from slipway.errors import ModelMergeError
from slipway.model.adapters.adapter_config import misfit, unsupported
from slipway.model.model_files import ADAPTER_PREFIX
from slipway.model.safetensors_file import TensorInfo
from slipway_merge.adapter.adapter import Adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from slipway.model.pytorch.conversions import Conversions


_MOST_PREFIXES = 64
"""Most prefixes to try; models have a handful."""
_TEXT_PARTS = frozenset({"language_model", "text_model"})
"""Names of the text model within a model that takes more than text."""


def name_in_text_model(name: str) -> str:
    """Return the name that a part of a model has in its text model alone."""
    return ".".join(part for part in name.split(".") if part not in _TEXT_PARTS)


class Naming:
    """Translates names.

    Args:
        base: Tensors of the base model by stored name.
        wanted: The adapter's names for some of them.
        conversions: Asks transformers for its renamings; called only if the tensors alone do not suffice.
    """

    def __init__(
        self, base: Mapping[str, TensorInfo], wanted: Iterable[str], conversions: Callable[[], Conversions]
    ) -> None:
        self._base = base
        self._wanted = list(wanted)
        self._conversions = conversions

    @cached_property
    def names(self) -> NameMap:
        """Map of the adapter's names to those in the base's files."""
        names = fit_names(self._wanted, self._base)
        unknown = [name for name in self._wanted if names.stored_name(name) is None]
        if not unknown:
            return names
        renamed, current = self._conversions().renamed, self._conversions().current
        translations = {name: renamed[current(name)] for name in unknown if current(name) in renamed}
        return replace(names, renamed={**renamed, **translations}) if translations else names

    def output(self, name: str) -> str:
        """Return the output name of a weight, given the adapter's name."""
        stored = self.names.stored_name(name)
        if stored is not None:
            return stored
        current = self._conversions().current(name)  # a tied weight has no stored tensor of its own
        return self._conversions().renamed.get(current, current)

    def output_from_model(self, name: str) -> str:
        """Return the output name of a weight, given the model's name."""
        return self._conversions().renamed.get(name) or self.output(name)

    def model_name(self, stored: str) -> str:
        """Return the model's own name for a base tensor."""
        return self._model_names.get(stored) or (self.names.model_name(stored) if stored in self._base else stored)

    def module_in_model(self, module: str) -> str:
        """Return the model's own name for a module, given the adapter's name."""
        return self.model_name(self.output(f"{module}.weight")).removesuffix(".weight")

    @cached_property
    def _model_names(self) -> dict[str, str]:
        return {stored: name for name, stored in self._conversions().renamed.items()}


def use_current_names(adapter: Adapter, model: PreTrainedModel, current: Callable[[str], str]) -> Adapter:
    """Rename the tensors left to peft from module names of an earlier transformers to today's.

    Args:
        adapter: The adapter.
        model: The model, without weights.
        current: Returns today's name for an earlier one.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` for patterns of earlier names, ``ADAPTER_TENSOR_UNUSED`` for a tensor under both
            names.
    """
    layers = {name for name, module in model.named_modules() if not list(module.children())}
    forms: dict[str, TensorInfo] = {}
    for key, info in adapter.forms.items():
        name = key.removeprefix(ADAPTER_PREFIX)
        known = name == key or any(name[:end] in layers for end, letter in enumerate(name) if letter == ".")
        if forms.setdefault(key if known else ADAPTER_PREFIX + current(name), info) is not info:
            raise ModelMergeError(
                f"the adapter has {key!r} twice, under today's name and one of an earlier transformers",
                reason="ADAPTER_TENSOR_UNUSED",
                remedy="save the adapter again",
                about={"tensor": key},
            )
    patterns = adapter.config.alpha_pattern
    if patterns and forms.keys() != adapter.forms.keys():
        raise unsupported("alpha_pattern", dict(patterns), "it is for the names that an earlier transformers had")
    return replace(adapter, forms=forms)


@dataclass(frozen=True)
class NameMap:
    """Translates names in the trained model to names in the base's files, and back.

    Attributes:
        names: Names in the base's files.
        strip: Prefix to remove from the trained model's name.
        add: Prefix to add then. It or ``strip`` is empty, unless the trained model is the text model within the base.
        renamed: Stored names of weights that transformers has, or had, under another name.
    """

    names: frozenset[str]
    strip: str = ""
    add: str = ""
    renamed: dict[str, str] = field(default_factory=dict, hash=False)

    def stored_name(self, name: str) -> str | None:
        """Return the base tensor for a name of the trained model, or None."""
        if name in self.names:
            return name
        if name in self.renamed:
            return self.renamed[name]
        if not name.startswith(self.strip):
            return None
        candidate = self.add + name.removeprefix(self.strip)
        return candidate if candidate in self.names else None

    def model_name(self, stored: str) -> str:
        """Return the trained model's name for a base tensor (the stored name if the prefixes agree)."""
        if stored in self._originals:
            return self._originals[stored]
        if stored.startswith(self.add) and (self.strip or self.add):
            return self.strip + stored.removeprefix(self.add)
        return stored

    def is_trained(self, stored: str) -> bool:
        """Return whether a base tensor may be part of the trained model, which may be only the text model within the base."""
        return stored.startswith(self.add) or not _TEXT_PARTS & set(self.add.split("."))

    @cached_property
    def _originals(self) -> dict[str, str]:
        """The first of several names for a stored tensor, which is the current one."""
        return {stored: name for name, stored in reversed(self.renamed.items())}


def fit_names(wanted: Iterable[str], stored: Iterable[str]) -> NameMap:
    """Find the prefix that makes most of the wanted names base tensors; none if they already are.

    A prefix is only removed or added, and has no layer number, so an encoder's adapter cannot be applied to a decoder, nor one layer's to
    another. The only exchange appends the text model's part (``model.`` becomes ``model.language_model.``).

    Raises:
        ModelMergeError: ``ADAPTER_BASE_MISMATCH`` if two prefixes explain the names equally well.
    """
    names = frozenset(stored)
    unresolved = sorted(name for name in set(wanted) if name not in names)
    candidates = sorted(_candidates(unresolved, names))
    if len(candidates) > _MOST_PREFIXES:
        raise _ambiguity_error(unresolved[0], candidates[:3])
    counts = {
        (strip, add): sum(NameMap(names, strip, add).stored_name(name) is not None for name in unresolved)
        for strip, add in candidates
    }
    if not counts:
        return NameMap(names)
    best = max(counts.values())
    winners = [pair for pair, count in counts.items() if count == best]
    if len(winners) > 1:
        raise _ambiguity_error(unresolved[0], winners)
    return NameMap(names, *winners[0])


def _ambiguity_error(name: str, prefixes: Sequence[tuple[str, str]]) -> ModelMergeError:
    shown = ", ".join(repr(add) if add else f"without {strip!r}" for strip, add in prefixes)
    return misfit(f"adapter tensor {name!r} fits base tensors under several prefixes ({shown})", tensor=name)


def _candidates(unresolved: list[str], names: frozenset[str]) -> set[tuple[str, str]]:
    candidates = set()
    for name in unresolved[:64]:
        parts = name.split(".")
        for cut in range(1, len(parts) - 2):
            prefix = parts[:cut]
            if not any(part.isdigit() for part in prefix) and ".".join(parts[cut:]) in names:
                candidates.add((f"{'.'.join(prefix)}.", ""))
        if len(parts) < 3:
            continue
        rest = f".{'.'.join(parts[1:])}"
        for part in _TEXT_PARTS:
            if f"{parts[0]}.{part}{rest}" in names:
                candidates.add((f"{parts[0]}.", f"{parts[0]}.{part}."))
        for stored in names:
            prefix = stored.removesuffix(f".{name}").split(".")
            if stored.endswith(f".{name}") and not any(part.isdigit() for part in prefix):
                candidates.add(("", f"{'.'.join(prefix)}."))
    return candidates
