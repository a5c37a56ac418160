"""Merge adapter forms through peft: their modules, their tensors, the merged values, and their initial weights.

peft decides whether a form can be merged: its layers either merge or say why not. So a new form of a later peft needs no change here.

PiSSA, OLoRA and FRoD extract a part of the base's weights when training starts; their initial weights are restored from the base.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import peft
import torch
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

from slipway.errors import ModelMergeError
from slipway.model.adapters.adapter_config import REPEATED_INITS, UNMERGED_REMEDY, incomplete, misfit, unsupported
from slipway.model.model_files import ADAPTER_PREFIX
from slipway.model.module_patterns import check_patterns, names_in
from slipway.model.safetensors_file import TensorInfo
from slipway.texts import counted
from slipway_merge.adapter.naming import Naming
from slipway_merge.peft.config import peft_config
from slipway_merge.peft.modules import (
    TORCH_TYPES,
    Holder,
    fill_layer,
    map_tensor,
    read_finite,
    run_peft,
    takes_known_inputs,
)
from slipway_merge.tensors.outputs import Computed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Largest difference between the outputs of a merged and an unmerged layer in float32 that rounding explains.
_TOLERANCE = 1e-3
_LARGE_RANK = 4096
"""Up to this rank, the factors of one layer take little memory."""

#: Forms that extract a part of the base's weights; LoRA does so with the repeatable initialisations.
_EXTRACTING_FORMS = frozenset({"frod", "osf"})
_SIXTEEN_BITS = frozenset({"F16", "BF16"})


class PeftForms:
    """The modules of an adapter that peft merges.

    Args:
        raw: ``adapter_config.json``.
        tensors: The adapter's tensors that belong to the form, by their full names.
        model: The base model, built without weights.
        only: Modules to take; None for every module the configuration targets.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        model: PreTrainedModel,
        *,
        only: Iterable[str] | None = None,
    ) -> None:
        self.raw = raw
        _check_rank(raw, tensors)
        self.config = peft_config(_drop_unknown_names(raw, model))
        self.form = "dora" if raw.get("use_dora") else str(raw["peft_type"]).lower()
        self.tensors = tensors
        check_patterns(raw, names_in(model))
        with run_peft("the adapter's target modules"):
            targets = _targets(self.config, model)
        chosen = targets if only is None else [name for name in targets if name in set(only)]
        self.layers = {name: model.get_submodule(name) for name in chosen}
        self.sources: dict[str, dict[str, TensorInfo]] = {}
        self._changed: dict[tuple[object, ...], frozenset[str]] = {}

    def parameters(self, module: str) -> list[str]:
        """Return the names of a module's parameters, relative to it."""
        return [name for name, _ in self.layers[module].named_parameters()]

    def own_tensors(self, module: str) -> dict[str, TensorInfo]:
        """Return the adapter tensors of one module."""
        start = f"{ADAPTER_PREFIX}{module}."
        return {key: info for key, info in self.tensors.items() if key.startswith(start)}

    def check(self) -> None:
        """Check that the adapter has exactly the tensors that its modules need, with the right shapes.

        Raises:
            ModelMergeError: ``CHECKPOINT_INCOMPLETE``, ``ADAPTER_TENSOR_UNUSED`` or ``ADAPTER_BASE_MISMATCH``.
        """
        expected: dict[str, tuple[int, ...]] = {}
        joint = bool(self.layers) and self.shares_state
        for group in [list(self.layers)] if joint else [[name] for name in self.layers]:
            with run_peft(f"module {group[0]!r}"):
                expected |= self._expected_tensors(group)
        for key, shape in expected.items():
            info = self.tensors.get(key)
            if info is None:
                what = f"by adapter_config.json there should be a tensor {key!r} {shape}, but the checkpoint holds none"
                raise incomplete(what, tensor=key)
            if info.shape != shape:
                what = f"adapter tensor {key!r} {info.shape} does not fit the base model and adapter_config.json"
                raise misfit(f"{what}, which want {shape}", tensor=key, shape=info.shape, expected=shape)
        unused = sorted(set(self.tensors) - set(expected))
        if unused:
            what = f"the adapter has {counted(len(unused), 'tensor')} that no base weight takes, first {unused[0]!r} "
            raise misfit(f"{what}{self.tensors[unused[0]].shape}", reason="ADAPTER_TENSOR_UNUSED", tensor=unused[0])

    def alters(self, module: str, parameter: str) -> bool:
        """Return whether the form changes a base weight when it is initialised, before any training."""
        with run_peft(f"module {module!r}"):
            weight = self._holder(module).base_layer(module).get_parameter(parameter)
        return not torch.equal(weight.float(), map_tensor(self.sources[module][parameter]).float())

    def changed_parameters(self, module: str) -> frozenset[str]:
        """Return which of a module's parameters the merge changes, determined once per kind of layer.

        The first layer of a kind represents all layers of that kind. It is also merged with disturbed values, because its trained values
        may happen to change nothing (an expert that no token reached).

        Raises:
            ModelMergeError: ``ADAPTER_UNSUPPORTED`` if peft cannot merge this form or layer.
        """
        layer = self.layers[module]
        own = self.own_tensors(module).items()
        # The shapes show whether IA³ scales the input, or the output with its bias.
        shapes = tuple(sorted((key.removeprefix(ADAPTER_PREFIX + module), info.shape) for key, info in own))
        kind = (type(layer), tuple(self.parameters(module)), shapes)
        if kind not in self._changed:
            with run_peft(f"module {module!r}"):
                holder = self._holder(module)
                after = holder.merge(module, torch.float32, keep=True)
                departure = holder.departure(module, after, layer)
                disturbed = holder.merge(module, torch.float32, keep=True, disturbed=True)
            if departure is not None and not departure <= _TOLERANCE:
                why = f"peft's merge of {module!r} is not what was trained: its output is off by {departure:.2g} of its norm"
                raise unsupported("peft_type", self.raw["peft_type"], why, remedy=UNMERGED_REMEDY)
            before = {name: map_tensor(info).to(torch.float32) for name, info in self.sources[module].items()}
            self._changed[kind] = frozenset(
                name
                for name in before
                if not (torch.equal(before[name], after[name]) and torch.equal(before[name], disturbed[name]))
            )
            extra = sorted(set(after) - set(before))
            if extra:
                why = f"merging {module!r} adds {extra[0]!r} to the model"
                raise unsupported("peft_type", self.raw["peft_type"], why)
        return self._changed[kind]

    def computation(self, module: str, parameter: str) -> Computed:
        """Return the computation of one parameter's merged values."""

        def compute(dtype: np.dtype[np.floating]) -> np.ndarray:
            with run_peft(f"module {module!r}"):
                after = self._holder(module).merge(module, TORCH_TYPES[np.dtype(dtype)], keep=self.shares_state)
            values: np.ndarray = after[parameter].contiguous().numpy()
            return values

        def error(written: TensorInfo) -> float:
            with run_peft(f"module {module!r}"):
                holder, layer = self._holder(module), self.layers[module]
                return holder.share_of_rounding(module, layer, parameter, written, keep=self.shares_state)

        checks = takes_known_inputs(self.layers[module])
        used = (*self.own_tensors(module).values(), *self._shared_tensors)
        return Computed(module, self.form, compute, error if checks else None, tensors=used)

    @cached_property
    def _shared_tensors(self) -> tuple[TensorInfo, ...]:
        """The adapter tensors that belong to no single module."""
        own = {key for module in self.layers for key in self.own_tensors(module)}
        return tuple(info for key, info in self.tensors.items() if key not in own)

    @cached_property
    def shares_state(self) -> bool:
        """Whether the modules must be built together."""
        first = next(iter(self.layers))
        if PEFT_TYPE_TO_TUNER_MAPPING[self.config.peft_type].uses_shared_state:
            return True
        with run_peft(f"module {first!r}"):
            return self._blank_holder([first]).shares_state

    def _blank_holder(self, names: list[str]) -> Holder:
        """Return a holder without values: on ``meta`` if the form can be built there, otherwise with zeros."""
        try:
            holder = Holder(self.config, {name: copy.deepcopy(self.layers[name]) for name in names})
            holder.expected_tensors()
        except (NotImplementedError, RuntimeError):  # the form needs values when it is built
            return self._zero_holder(names)
        return holder

    def _expected_tensors(self, names: list[str]) -> dict[str, tuple[int, ...]]:
        if self.shares_state:
            return self._joint_holder.expected_tensors()
        expected = self._blank_holder(names).expected_tensors()
        complete = all(self.own_tensors(name).keys() <= expected.keys() for name in names)
        return (
            expected if complete else self._zero_holder(names).expected_tensors()
        )  # on meta a form may defer some parts

    def _zero_holder(self, names: list[str]) -> Holder:
        return Holder(self.config, {name: fill_layer(self.layers[name], _zeros) for name in names})

    @cached_property
    def _joint_holder(self) -> Holder:
        """All modules in one holder, on the base's own bytes, for forms whose modules depend on each other."""
        layers = {name: fill_layer(layer, partial(self._map_source, name)) for name, layer in self.layers.items()}
        return Holder(self.config, layers)

    def _map_source(self, module: str, path: str, _: torch.Tensor) -> torch.Tensor:
        return map_tensor(self.sources[module][path])

    @cached_property
    def _loaded_joint_holder(self) -> Holder:
        self._joint_holder.load({key: read_finite(info, "the adapter") for key, info in sorted(self.tensors.items())})
        return self._joint_holder

    def _holder(self, module: str) -> Holder:
        """Return the module with its trained adapter.

        It is built in the stored type, as in training, because some forms derive a part of themselves from the base.
        """
        values = {name: read_finite(info, "the base model") for name, info in self.sources[module].items()}
        if self.shares_state:
            return self._loaded_joint_holder
        holder = Holder(self.config, {module: fill_layer(self.layers[module], lambda path, _: values[path])})
        own = self.own_tensors(module)
        holder.load({key: read_finite(info, "the adapter") for key, info in sorted(own.items())})
        return holder


def _zeros(_: str, parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(parameter.shape, dtype=torch.float32)


def _drop_unknown_names(raw: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Drop listed names that no module has, because peft compares each name with every other one.

    Keep the first target if none is left, so that peft refuses the list.
    """
    known = {
        ".".join(parts[start:])
        for name, _ in model.named_modules()
        for parts in (name.split("."),)
        for start in range(len(parts))
    }
    kept = dict(raw)
    for key in ("target_modules", "exclude_modules", "feedforward_modules"):
        if isinstance(raw.get(key), list):
            kept[key] = [name for name in raw[key] if not isinstance(name, str) or name in known]
    if isinstance(raw.get("target_modules"), list):
        kept["target_modules"] = kept["target_modules"] or raw["target_modules"][:1]
    return kept


def _check_rank(raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse a large rank that no tensor of the adapter has, before factors of it are built.

    LoKr writes any large rank to mean "no factors". AdaLoRA's tensors are smaller than its first rank; its lists of ranks show that rank.
    """
    rank = max((raw[key] for key in ("r", "init_r") if isinstance(raw.get(key), int)), default=0)
    if rank <= _LARGE_RANK or raw.get("peft_type") == "LOKR":
        return
    pattern = raw.get("rank_pattern")
    ranks = pattern.values() if isinstance(pattern, dict) else ()
    sizes = [size for info in tensors.values() for size in info.shape]
    if rank > max([*sizes, *(len(kept) for kept in ranks if isinstance(kept, list))], default=0):
        raise ModelMergeError(
            f"adapter_config.json has rank {rank}, but no tensor of the adapter is that large",
            reason="ADAPTER_CONFIG_INVALID",
            remedy="use the adapter_config.json that was saved with these weights",
            about={"key": "r"},
        )


def _targets(config: peft.PeftConfig, model: PreTrainedModel) -> list[str]:
    """Return the names of the modules that a configuration targets by peft's own matching, in the model's order."""
    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
    modules: list[str] = []

    class Matching(tuner):  # type: ignore[misc]
        """The tuner, changed to record the modules instead of replacing them."""

        def _pre_injection_hook(self, *args: Any, **kwargs: Any) -> None: ...

        def _post_injection_hook(self, *args: Any, **kwargs: Any) -> None: ...

        def _mark_only_adapters_as_trainable(self, *args: Any, **kwargs: Any) -> None: ...

        def _create_and_replace(self, *_: Any, current_key: str, **__: Any) -> None:
            modules.append(current_key)

    config = copy.deepcopy(config)
    if hasattr(config, "target_parameters"):
        config.target_parameters = None
    if hasattr(config, "layer_replication"):
        config.layer_replication = None
    Matching(copy.deepcopy(model), {"default": config}, "default")._check_merge_allowed()
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return sorted(modules, key=lambda name: order[name])


def initial_precision_warning(forms: PeftForms) -> str | None:
    """Return a warning if the result depends on the unknown precision in which training split the weights; else None."""
    init = str(forms.raw.get("init_lora_weights")).lower()
    narrow = {info.dtype for sources in forms.sources.values() for info in sources.values()} & _SIXTEEN_BITS
    if not narrow or (forms.form not in _EXTRACTING_FORMS and init not in REPEATED_INITS):
        return None
    name = init if init in REPEATED_INITS else forms.form
    return (
        f"{name} splits the base's weights when training starts, and the checkpoint does not name their type at that time: it is "
        f"merged as if in {min(narrow)}, their stored type; if it was trained in another type, the merged model differs"
    )


def restore_initial_weights(
    forms: PeftForms, base: Mapping[str, TensorInfo], naming: Naming, *, tied: Collection[str]
) -> None:
    """Use the base's weight: the checkpoint's copy already lacks the extracted part.

    Args:
        forms: The modules left to peft; their sources are corrected.
        base: Tensors of the base model by stored name.
        naming: Translates names.
        tied: Weights that share a storage with others, which lost that part too.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` if other weights changed too, or the base's does not fit.
    """
    for module in forms.layers:
        for path, source in forms.sources[module].items():
            name = naming.output(f"{module}.{path}")
            first = base.get(name)
            if (source is first and name not in tied) or not forms.alters(module, path):
                continue
            if first is None or name in tied or first.shape != source.shape:
                key = "init_lora_weights" if "init_lora_weights" in forms.raw else "peft_type"
                why = f"it changed {name!r} when the training began, which was resized or shares its values with another weight"
                raise unsupported(key, forms.raw[key], why, remedy=UNMERGED_REMEDY)
            forms.sources[module][path] = first
