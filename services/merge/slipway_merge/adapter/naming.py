"""Translate names of weights between the adapter, the base's files, and today's transformers model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from slipway.errors import ModelMergeError
from slipway.model.adapters.refusals import unsupported
from slipway.model.model_files import ADAPTER_PREFIX
from slipway.model.safetensors_file import TensorInfo
from slipway_merge.adapter.adapter import Adapter
from slipway_merge.adapter.names import NameMap, fit_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from slipway_merge.adapter.conversions import Conversions


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
        unknown = [name for name in self._wanted if names.stored(name) is None]
        if not unknown:
            return names
        renamed, current = self._conversions().renamed, self._conversions().current
        found = {name: renamed[current(name)] for name in unknown if current(name) in renamed}
        return replace(names, renamed={**renamed, **found}) if found else names

    def output(self, name: str) -> str:
        """Return the output name of a weight, given the adapter's name."""
        stored = self.names.stored(name)
        if stored is not None:
            return stored
        current = self._conversions().current(name)  # a tied weight has no stored tensor of its own
        return self._conversions().renamed.get(current, current)

    def of_model(self, name: str) -> str:
        """Return the output name of a weight, given the model's name."""
        return self._conversions().renamed.get(name) or self.output(name)

    def modelled(self, stored: str) -> str:
        """Return the model's own name for a base tensor."""
        return self._modelled.get(stored) or (self.names.modelled(stored) if stored in self._base else stored)

    def in_model(self, module: str) -> str:
        """Return the model's own name for a module, given the adapter's name."""
        return self.modelled(self.output(f"{module}.weight")).removesuffix(".weight")

    @cached_property
    def _modelled(self) -> dict[str, str]:
        return {stored: name for name, stored in self._conversions().renamed.items()}


def under_current_names(adapter: Adapter, model: PreTrainedModel, current: Callable[[str], str]) -> Adapter:
    """Return the adapter with the tensors left to peft under today's module names, which may differ from earlier transformers'.

    Args:
        adapter: The adapter.
        model: The model, without weights.
        current: Returns today's name for an earlier one.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` for patterns of earlier names, ``ADAPTER_TENSOR_UNUSED`` for the same under both.
    """
    layers = {name for name, module in model.named_modules() if not list(module.children())}
    found: dict[str, TensorInfo] = {}
    for key, info in adapter.forms.items():
        name = key.removeprefix(ADAPTER_PREFIX)
        known = name == key or any(name[:end] in layers for end, letter in enumerate(name) if letter == ".")
        if found.setdefault(key if known else ADAPTER_PREFIX + current(name), info) is not info:
            raise ModelMergeError(
                f"the adapter has {key!r} twice, under today's name and one of an earlier transformers",
                reason="ADAPTER_TENSOR_UNUSED",
                remedy="save the adapter again",
                about={"tensor": key},
            )
    patterns = adapter.config.alpha_pattern
    if patterns and found.keys() != adapter.forms.keys():
        raise unsupported("alpha_pattern", dict(patterns), "it is for the names that an earlier transformers had")
    return replace(adapter, forms=found)
