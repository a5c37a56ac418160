"""Give peft the part of an adapter that it can place, and compute the rest: updates of weights that transformers joins.

Transformers 4 had a linear layer for each projection of each expert, and adapters were saved by these names. Transformers 5 joins them when it
loads a base. peft converts such adapters too, but by the ends of names: of a mixture with a shared expert, or with dense first layers, it places
one kind of layers and drops the others without an error. So these updates are kept apart from peft: they are converted by transformers' own
conversion of the weights they belong to, and added to the joined weight while its module computes.

Names of the text model alone, on a model that takes more than text, and other tools' names of the head are translated for peft. Parameters
that a LoRA targets by themselves (``target_parameters``: stacks of experts, routers) are peft's to place, like layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft.utils.transformers_weight_conversion as peft_conversion
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slipway.model.adapters.saved import pair_name, unwrap_name
from slipway.model.folder import ModelFolder
from slipway.model.model_files import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from slipway.model.pytorch.joined_updates import JoinedUpdates, find_joined
from slipway.model.runs.checkpoints import read_adapter_config
from slipway.model.safetensors_file import read_safetensors

_LAYERS = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd, Conv1D, nn.MultiheadAttention)
"""Layers whose updates are peft's to place."""
_WRAPPED = ".base_layer"
"""What peft adds to a module's name for each further parameter of it that has factors of its own."""
_TEXT_PARTS = frozenset({"language_model", "text_model"})
"""Names of the text model within a model that takes more than text."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Where an adapter's factors belong in a model.

    Attributes:
        kinds: Classes of the model's modules.
        renamed: The module for each name in the adapter that is not the model's own.
        targeted: Parameters of the model that have factors of their own.
    """

    kinds: Mapping[str, type]
    renamed: Mapping[str, str]
    targeted: tuple[str, ...]

    def module(self, owner: str) -> str:
        """Return the module of an adapter's name; empty if there is none."""
        return _find_module(unwrap_module(self.renamed.get(owner, owner)), self.kinds)

    def holds_targeted(self, module: str) -> bool:
        """Return whether a module holds a parameter that has factors of its own."""
        return any(name.rpartition(".")[0] == module for name in self.targeted)

    def are_in_text(self, owners: Collection[str]) -> bool:
        """Return whether all names belong to the text model within a larger one: the adapter's settings may be for that alone."""
        return bool(owners) and all(_TEXT_PARTS & set(self.module(owner).split(".")) for owner in owners)

    def can_be_placed(self, owner: str) -> bool:
        """Return whether peft can place the factors of an adapter's name."""
        module = self.module(owner)
        return bool(module) and (issubclass(self.kinds[module], _LAYERS) or self.holds_targeted(module))


@contextmanager
def make_placeable(model: Any, base: ModelFolder, adapter: Path) -> Iterator[tuple[Path, JoinedUpdates | None]]:
    """Yield a folder with the part of the adapter that peft can place, and the other updates; the adapter's own folder if peft can place all.

    Args:
        model: The transformers model, without an adapter.
        base: The folder of its weights.
        adapter: The adapter's folder, whose weights are safetensors.

    Raises:
        ValueError: An update that peft cannot place has an unknown form.
    """
    settings, owners = read_adapter_config(adapter), _owners(adapter)
    kinds = {name: type(module) for name, module in model.named_modules()}
    renamed = _find_renamed(owners, kinds)
    targeted = _find_targeted(model, settings)
    places = _Places(kinds, renamed, targeted)
    other = [owner for owner in owners if owner not in renamed and not places.can_be_placed(owner)]
    joined = find_joined(model, base, adapter, settings, {owner: owners[owner] for owner in other}) if other else None
    # Where every factor has a module of today's model, there is nothing to convert.
    with without_conversion() if joined or (owners and not other) else nullcontext():
        if joined is None and not renamed and not places.are_in_text(owners):
            yield adapter, None
            return
        with TemporaryDirectory() as place:
            _write_rest(Path(place), adapter, settings, joined, places)
            yield Path(place), joined


def rename_patterns(settings: Mapping[str, Any], modules: Mapping[str, str]) -> dict[str, Any]:
    """Return an adapter's settings with its ranks and scalings by pattern (``rank_pattern``, ``alpha_pattern``) under a model's names too.

    peft takes the default without an error where a pattern holds the name in the text model alone.

    Args:
        settings: Its ``adapter_config.json``.
        modules: By the adapter's name of a module, its name in the model.
    """
    ends = ("", *(f".{target.rpartition('.')[2]}" for target in settings.get("target_parameters") or ()))
    renamed = dict(settings)
    for option in ("rank_pattern", "alpha_pattern"):
        if patterns := settings.get(option):
            names = {unwrap_module(old) + end: unwrap_module(new) + end for old, new in modules.items() for end in ends}
            keys = {re.escape(new): get_pattern_key(patterns, old) for old, new in names.items() if old != new}
            renamed[option] = {**{name: patterns[key] for name, key in keys.items() if key in patterns}, **patterns}
    return renamed


def find_unplaced(tuned: nn.Module, adapter: Path) -> list[str]:
    """Return the adapter's factors that no parameter of a model holds; compare values, because names may differ."""
    held: dict[tuple[Any, ...], int] = {}
    for name, tensor in tuned.named_parameters():
        if ".lora_" in name:
            held[_fingerprint(tensor)] = held.get(_fingerprint(tensor), 0) + 1
    left = []
    for name, tensor in load_file(adapter / ADAPTER_WEIGHTS).items():
        if pair_name(unwrap_name(name)) is None:
            continue
        if held.get(_fingerprint(tensor), 0):
            held[_fingerprint(tensor)] -= 1
        else:
            left.append(name)
    return left


def _fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """Return a fingerprint of a tensor's values, the same in any type that holds them."""
    values = tensor.detach().double().flatten()
    return tuple(tensor.shape), float(values.sum()), float(values.abs().sum()), *values[:4].tolist()


def _owners(adapter: Path) -> dict[str, list[str]]:
    """Return the adapter's tensors by the module whose factors they are."""
    owners: dict[str, list[str]] = {}
    for name in read_safetensors(adapter / ADAPTER_WEIGHTS).tensors:
        module = unwrap_name(name).removeprefix(ADAPTER_PREFIX).partition(".lora_")[0]
        if ".lora_" in name:
            owners.setdefault(module, []).append(name)
    return owners


def _find_module(owner: str, kinds: Mapping[str, type]) -> str:
    """Return the module of a name, or the longest with which it ends, because adapters may have prefixes of their own; empty if there is none."""
    parts = owner.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((end for end in ends if end in kinds), "")


def unwrap_module(owner: str) -> str:
    """Return a module's name without what peft adds for each parameter of it that has factors."""
    while owner.endswith(_WRAPPED):
        owner = owner.removesuffix(_WRAPPED)
    return owner


def _find_targeted(model: Any, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parameters that ``target_parameters`` names; it may name those of the text model alone."""
    wanted = settings.get("target_parameters") or []
    if not isinstance(wanted, list) or not all(isinstance(target, str) for target in wanted):
        raise ValueError("target_parameters in adapter_config.json is not a list of names")
    names = [name for name, _ in model.named_parameters()] if wanted else []
    return tuple(name for name in names if any(_is_named(name, target) for target in wanted))


def _is_named(name: str, target: str) -> bool:
    if f".{name}".endswith(f".{target}"):
        return True
    in_text, in_layer = _TEXT_PARTS & set(name.split(".")), any(part.isdigit() for part in target.split("."))
    return bool(in_text) and in_layer and _from_layer(name) == _from_layer(target)


def _find_renamed(owners: Mapping[str, list[str]], kinds: Mapping[str, type]) -> dict[str, str]:
    """Return the module for each name that is not the model's own: another tool's name of the head, or a name in the text model alone."""
    by_end: dict[str, list[str]] = {}
    for name in kinds:
        if _TEXT_PARTS & set(name.split(".")):
            by_end.setdefault(_from_layer(name), []).append(name)
    modules = {}
    for owner, names in owners.items():
        plain = unwrap_module(owner)
        wrapped = owner.removeprefix(plain)
        if module := _find_module(plain, kinds):
            if any(owner not in name for name in names):
                modules[owner] = module + wrapped
        elif len(within := by_end.get(_from_layer(plain), [])) == 1:
            modules[owner] = within[0] + wrapped
    return modules


def _from_layer(name: str) -> str:
    """Return the end of a name from its first layer number on; without one, its last part."""
    parts = name.split(".")
    return ".".join(parts[next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1) :])


def _write_rest(
    place: Path,
    adapter: Path,
    settings: Mapping[str, Any],
    joined: JoinedUpdates | None,
    places: _Places,
) -> None:
    """Write the adapter under the model's names and without some of its updates.

    If nothing is left, write an adapter without effect, because peft takes no empty one.
    """
    left_out = joined.names if joined else ()
    tensors, modules = {}, set()
    for key, value in load_file(adapter / ADAPTER_WEIGHTS).items():
        if key in left_out:
            continue
        owner, lora, rest = unwrap_name(key).removeprefix(ADAPTER_PREFIX).partition(".lora_")
        tensors[f"{ADAPTER_PREFIX}{places.renamed.get(owner, owner)}{lora}{rest}"] = value
        if lora and not places.holds_targeted(places.module(owner)):
            modules.add(places.module(owner))
    if not tensors:
        modules = {next(name for name, kind in places.kinds.items() if issubclass(kind, nn.Linear))}
    settings = rename_patterns(settings, places.renamed)
    if all(modules):
        settings = {
            **settings,
            "target_modules": sorted(modules),
            "target_parameters": list(places.targeted) or None,
            **dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern")),
        }
    (place / ADAPTER_CONFIG).write_text(json.dumps(settings), encoding="utf-8")
    save_file(tensors, place / ADAPTER_WEIGHTS, metadata={"format": "pt"})


@contextmanager
def without_conversion() -> Iterator[None]:
    """Keep peft from rewriting an adapter's targets: it moves all layers of an expert's names, dense ones too, to the stacks."""
    before = peft_conversion.convert_peft_config_for_transformers
    peft_conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        peft_conversion.convert_peft_config_for_transformers = before
