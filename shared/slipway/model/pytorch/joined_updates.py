"""Updates of weights that transformers joins when it loads a model: converted as the weights are, and added while their module computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from slipway.model.adapters.saved import pair_name, unwrap_name
from slipway.model.folder import ModelFolder
from slipway.model.model_files import ADAPTER_WEIGHTS


@dataclass(frozen=True, slots=True)
class _Update:
    """The update of one stored weight: scale · B · A."""

    a: Tensor
    b: Tensor
    scale: float

    def value(self) -> Tensor:
        return self.scale * (self.b.double() @ self.a.double()).float()


@dataclass(frozen=True, slots=True)
class JoinedUpdates:
    """Updates of parameters that are no layer's weight, by the name of the parameter.

    Attributes:
        names: Tensors of the adapter that they take.
        parts: By parameter, the weights that transformers joins into it with their shapes.
        updates: The updates, by the name of the weight.
    """

    names: frozenset[str]
    parts: Mapping[str, Mapping[str, tuple[int, ...]]]
    updates: Mapping[str, _Update]

    def attach(self, model: Any, tuned: nn.Module) -> None:
        """Let the model compute with the updates wherever its adapter is switched on.

        Args:
            model: The transformers model.
            tuned: The model with the adapter, as peft wraps it.
        """
        layer = next(each for each in tuned.modules() if isinstance(each, BaseTunerLayer))
        for parameter in self.parts:
            owner, _, name = parameter.rpartition(".")
            _add_while_computing(
                model.get_submodule(owner),
                name,
                change=partial(self.change, model, parameter),
                is_on=lambda: not layer.disable_adapters,
            )

    def change(self, model: Any, parameter: str) -> Tensor:
        """Return the update of a parameter in float32, in its own form."""
        values = {
            name: self.updates[name].value() if name in self.updates else torch.zeros(shape)
            for name, shape in self.parts[parameter].items()
        }
        return _join_weights(model, values)[parameter]


def find_joined(
    model: Any, base: ModelFolder, adapter: Path, settings: Mapping[str, Any], owners: Mapping[str, list[str]]
) -> JoinedUpdates | None:
    """Return the updates of weights that transformers joins; None if there are none.

    Args:
        model: The model that the base was loaded as.
        base: The base.
        adapter: Folder of the adapter.
        settings: Its ``adapter_config.json``.
        owners: Names of the factors by the layer that they belong to.

    Raises:
        ValueError: The factors are no plain pair, do not fit, or belong to a weight that the base does not have.
    """
    stored = {name: info.shape for name, info in base.tensors.items()}
    targets = {name: target for name, (target, _) in _targets(model, stored).items()}
    updates: dict[str, _Update] = {}
    taken: set[str] = set()
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    prefix = f"{model.base_model_prefix}."
    for owner, names in owners.items():
        forms = (f"{owner}.weight", f"{prefix}{owner}.weight", f"{owner}.weight".removeprefix(prefix))
        weight = next((form for form in forms if form in targets), "")
        if not weight:
            if any(pattern for _, pattern in _targets(model, dict.fromkeys(forms, ())).values()):
                raise ValueError(f"the base has no weight {forms[0]!r}, which the adapter updates")
            continue
        updates[weight] = _make_update(owner, {name: tensors[name] for name in names}, stored[weight], settings)
        taken |= set(names)
    if not updates:
        return None
    changed = {targets[weight] for weight in updates}
    parts: dict[str, dict[str, tuple[int, ...]]] = {parameter: {} for parameter in sorted(changed)}
    for name, target in targets.items():
        if target in changed:
            parts[target][name] = stored[name]
    return JoinedUpdates(frozenset(taken), parts, updates)


def _make_update(
    owner: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], settings: Mapping[str, Any]
) -> _Update:
    sides = {match["side"]: tensors[name] for name in tensors if (match := pair_name(unwrap_name(name)))}
    if len(sides) != len(tensors) or set(sides) != {"A", "B"} or settings.get("use_dora"):
        raise ValueError(
            f"the adapter's update of {owner!r}, which transformers joins with others, is no plain pair of factors"
        )
    a, b = sides["A"], sides["B"]
    if a.dim() != 2 or b.dim() != 2 or (b.shape[0], a.shape[1]) != tuple(shape) or a.shape[0] != b.shape[1]:
        raise ValueError(
            f"the factors {tuple(a.shape)} and {tuple(b.shape)} of {owner!r} do not fit its weight of {tuple(shape)}"
        )
    ranks, alphas = (settings.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
    rank = ranks.get(get_pattern_key(ranks, owner), settings.get("r"))
    alpha = alphas.get(get_pattern_key(alphas, owner), settings.get("lora_alpha"))
    if rank != a.shape[0]:
        raise ValueError(f"the factors of {owner!r} have rank {a.shape[0]}, and adapter_config.json says {rank}")
    return _Update(a, b, alpha / (rank**0.5 if settings.get("use_rslora") else rank))


def _targets(model: Any, names: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    """Return the parameter that transformers makes of each stored weight, and the pattern of the conversion; none for those it does not use."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    state = model.state_dict()
    targets = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target in state:
            targets[name] = (target, pattern)
    return targets


def _join_weights(model: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights as transformers does when it loads them."""
    converters = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    conversions: dict[str, Any] = {}
    for name, (target, pattern) in _targets(model, values).items():
        made = copy.deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(name, target)
        conversions.setdefault(target, made).add_tensor(target, name, pattern or name, values[name])
    results: dict[str, Tensor] = {}
    for target, conversion in conversions.items():
        made = conversion.convert(target, model=model, config=model.config, hf_quantizer=None, loading_info=None)
        results |= {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
    return results


def _add_while_computing(
    owner: nn.Module, name: str, *, change: Callable[[], Tensor], is_on: Callable[[], bool]
) -> None:
    """Let a module compute with a changed parameter; it holds the plain one between its calls."""
    plain: list[Any] = []

    def add(module: nn.Module, *_: Any) -> None:
        kept = module._parameters[name]
        plain.append(kept)
        if is_on() and kept is not None:
            changed = (kept.float() + change().to(kept.device)).to(kept.dtype)
            module._parameters[name] = nn.Parameter(changed, requires_grad=False)

    def take_back(module: nn.Module, *_: Any) -> None:
        module._parameters[name] = plain.pop()

    owner.register_forward_pre_hook(add)
    owner.register_forward_hook(take_back, always_call=True)
