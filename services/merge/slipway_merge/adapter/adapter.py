"""Sort the adapter's tensors by kind: LoRA pairs, whole tensors, rows, experts, and forms that peft merges.

Every tensor of ``adapter_model.safetensors`` belongs to exactly one kind or is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipway.errors import ModelMergeError
from slipway.model.adapters.adapter_config import AdapterConfig, parse_adapter_config
from slipway.model.adapters.saved import (
    EMBEDDING_PAIR,
    Pair,
    broken_adapter_error,
    check_halves,
    make_pair,
    pair_name,
    unwrap_name,
)
from slipway.model.model_files import ADAPTER_PICKLE, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from slipway.model.runs.checkpoints import read_adapter_config
from slipway.model.safetensors_file import TensorInfo, read_safetensors
from slipway_merge.tensors.tensor_io import TensorReader

#: Rows of an embedding, in an adapter with other parts or without.
_ROWS = re.compile(r"(?P<module>.+?)(\.token_adapter)?\.trainable_tokens_delta")


@dataclass(frozen=True, slots=True)
class ExpertPair:
    """The stored factors of a targeted parameter."""

    a: TensorInfo
    b: TensorInfo


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor saved in full.

    Attributes:
        name: Name of the base tensor that it replaces.
        info: Where it is stored.
        own: True for a module of ``modules_to_save``, which peft gives its own weights even if the base ties them. False for a
            base weight saved along (a targeted or resized embedding), which replaces all weights tied to it.
        copies: The same tensor under other names, which peft writes after a resize; they must equal ``info``.
        untrained: Values before the training, which peft also writes after a resize; unused.
    """

    name: str
    info: TensorInfo
    own: bool
    copies: tuple[TensorInfo, ...] = ()
    untrained: tuple[TensorInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A parsed adapter.

    Attributes:
        config: Its configuration.
        pairs: Low-rank pairs by module.
        whole: Whole tensors by the name of the base tensor they replace.
        rows: Rows that replace some of an embedding's, by module.
        forms: Tensors left to peft, by full name.
        experts: Pairs of targeted parameters, by module and number of other parameters' pairs wrapped around them.
    """

    config: AdapterConfig
    pairs: Mapping[str, Pair]
    whole: Mapping[str, WholeTensor]
    rows: Mapping[str, TensorInfo]
    forms: Mapping[str, TensorInfo]
    experts: Mapping[tuple[str, int], ExpertPair]

    def formed_modules(self) -> set[str]:
        """Return the LoRA modules left to peft."""
        return {key.removeprefix(ADAPTER_PREFIX).partition(".lora_")[0] for key in self.forms}

    def tensors_by_module(self) -> Iterator[tuple[str, TensorInfo]]:
        """Yield every tensor not left to peft with its module, except those of targeted parameters."""
        for module, pair in self.pairs.items():
            yield from ((module, pair.a), (module, pair.b))
        for name, whole in self.whole.items():
            for info in (whole.info, *whole.copies, *whole.untrained):
                yield name.rpartition(".")[0], info
        yield from self.rows.items()

    def tensors(self) -> list[TensorInfo]:
        """Return every tensor of the adapter, once."""
        pairs = [info for pair in self.pairs.values() for info in (pair.a, pair.b)]
        experts = [info for expert in self.experts.values() for info in (expert.a, expert.b)]
        whole = [info for tensor in self.whole.values() for info in (tensor.info, *tensor.copies, *tensor.untrained)]
        return [*pairs, *whole, *self.rows.values(), *self.forms.values(), *experts]


def read_adapter(folder: Path) -> Adapter:
    """Read and check the adapter in a folder; the base model is not needed.

    Raises:
        CheckpointValidationError: ``ADAPTER_CONFIG_MISSING``, ``ADAPTER_CONFIG_INVALID``, ``SAFETENSORS_CORRUPT``,
            ``UNSAFE_PICKLE`` or ``CHECKPOINT_INCOMPLETE``.
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` or ``ADAPTER_CONFIG_INVALID``.
    """
    raw = read_adapter_config(folder)
    path = folder / ADAPTER_WEIGHTS
    stored = read_safetensors(path).tensors if path.is_file() else {}
    config = parse_adapter_config(raw, map(_module_of, stored))
    if config.through_peft:
        from slipway_merge.peft.config import peft_config

        peft_config(config.raw)
    if not path.is_file():
        raise _no_weights_error(folder)
    tensors = _use_saved_names(stored, config)
    sides, rest = _take_sides(tensors, config)
    experts = _take_experts(sides, config)
    pairs = dict(sorted(make_pair(module, embedding, slot, config) for (module, embedding), slot in sides.items()))
    if len(pairs) != len(sides):
        raise broken_adapter_error("a module has both a linear and an embedding pair", key="")
    rows: dict[str, TensorInfo] = {}
    forms: dict[str, TensorInfo] = {}
    whole: dict[str, dict[str, TensorInfo]] = {}
    for key, info in rest.items():
        name = key.removeprefix(ADAPTER_PREFIX)
        if match := _ROWS.fullmatch(name):
            if rows.setdefault(match["module"], info) is not info:
                raise broken_adapter_error(
                    f"tensors {rows[match['module']].name!r} and {key!r} stand for the same rows", key
                )
        elif _is_of_form(key, config):
            forms[key] = info
        else:
            clean, role = _role(name)
            slot = whole.setdefault(clean, {})
            if role in slot:
                raise broken_adapter_error(f"tensors {slot[role].name!r} and {key!r} stand for the same weight", key)
            slot[role] = info
    if not tensors:
        raise broken_adapter_error(f"{ADAPTER_WEIGHTS} holds no tensor", key="")
    replaced = {name: _whole_tensor(name, slot, config) for name, slot in sorted(whole.items())}
    return Adapter(config, pairs, replaced, dict(sorted(rows.items())), dict(sorted(forms.items())), experts)


def _module_of(key: str) -> str:
    """Return the module of a stored tensor, if it is a LoRA factor."""
    return unwrap_name(key).removeprefix(ADAPTER_PREFIX).partition(".lora_")[0]


def _use_saved_names(tensors: Mapping[str, TensorInfo], config: AdapterConfig) -> dict[str, TensorInfo]:
    """Rename tensors to the names that peft saves.

    In a model, and so in shards that a tool has joined, names also contain the adapter's name and the model's wrappers (``module``,
    ``_orig_mod``). It does not matter whether the model was wrapped before or after it got the adapter.
    """
    saved: dict[str, TensorInfo] = {}
    for key, info in tensors.items():
        name = unwrap_name(key)
        if ".trainable_tokens_delta" in key or _is_of_form(key, config):
            name = re.sub(r"\.default(?=(\.[^.]+)?$)", "", name)
            name = name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
        if saved.setdefault(name, info) is not info and not _are_same(saved[name], info):
            raise broken_adapter_error(f"tensors {saved[name].name!r} and {key!r} stand for the same", key)
    return saved


def _are_same(first: TensorInfo, second: TensorInfo) -> bool:
    """Return whether two tensors are equal. With ``save_embedding_layers`` peft saves an embedding's DoRA tensors under two names."""
    with TensorReader() as reader:
        return reader.same(first, second)


#: Module and whether it is an embedding → the halves of its pair.
_Sides = dict[tuple[str, bool], dict[str, TensorInfo]]


def _take_sides(tensors: Mapping[str, TensorInfo], config: AdapterConfig) -> tuple[_Sides, dict[str, TensorInfo]]:
    """Split tensors into the halves of plain pairs of matrices, and all others; peft merges modules with more than a pair."""
    sides: _Sides = {}
    rest: dict[str, TensorInfo] = {}
    adapters: set[str] = set()
    special = {key.partition(".lora_")[0] for key in tensors if ".lora_" in key and not pair_name(key)}
    special |= {key.partition(".lora_")[0] for key, info in tensors.items() if ".lora_" in key and len(info.shape) > 2}
    for key, info in tensors.items():
        match = pair_name(key)
        if match is None or config.through_peft or key.partition(".lora_")[0] in special:
            rest[key] = info
            continue
        adapters.add(match["adapter"] or "")
        slot = sides.setdefault((match["module"], match.re is EMBEDDING_PAIR), {})
        if match["side"] in slot:
            raise broken_adapter_error(f"tensor {key!r} appears twice", key)
        slot[match["side"]] = info
    if len(adapters) > 1:
        raise broken_adapter_error(
            f"it holds several adapters ({', '.join(sorted(adapters))}); save the one to merge alone", key=""
        )
    return sides, rest


def _take_experts(sides: _Sides, config: AdapterConfig) -> dict[tuple[str, int], ExpertPair]:
    """Move the pairs of modules with targeted parameters (``target_parameters``) out of ``sides``.

    A parameter named without its module may belong to any module that is not a target itself. peft saves ``gate_proj``, ``w1`` or
    ``all-linear`` this way where transformers stacks them.
    """
    owners = [f".{parameter.rpartition('.')[0]}" for parameter in config.parameters if "." in parameter]
    anywhere = len(owners) < len(config.parameters)
    experts = {}
    for module, embedding in sorted(sides):
        owner = module
        while owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
        named = any(f".{owner}".endswith(name) for name in owners) or (anywhere and not config.names(owner))
        if not embedding and named:
            slot = sides.pop((module, embedding))
            check_halves(slot)
            experts[owner, module.count(".base_layer")] = ExpertPair(slot["A"], slot["B"])
    return experts


def _is_of_form(key: str, config: AdapterConfig) -> bool:
    """Return whether a tensor belongs to the adapter's form; ask peft unless the form is LoRA."""
    if config.raw.get("peft_type") == "LORA":
        return ".lora_" in key
    from slipway_merge.peft.config import is_peft_tensor

    return is_peft_tensor(key, config.raw)


def _role(name: str) -> tuple[str, str]:
    """Return the name of the weight that a whole tensor replaces, and the peft wrapper it was saved from."""
    match = re.fullmatch(
        r"(.+?)(?:\.token_adapter)?\.(modules_to_save|original_module|base_layer)(?:\.default)?\.([^.]+)", name
    )
    return (f"{match[1]}.{match[3]}", match[2]) if match else (name, "plain")


def _whole_tensor(name: str, slot: Mapping[str, TensorInfo], config: AdapterConfig) -> WholeTensor:
    trained = [slot[role] for role in ("modules_to_save", "plain", "base_layer") if role in slot]
    untrained: tuple[TensorInfo, ...] = (slot["original_module"],) if "original_module" in slot else ()
    if not trained:
        raise broken_adapter_error(f"tensor {untrained[0].name!r} has no trained partner", untrained[0].name)
    module = f".{name.rpartition('.')[0]}."
    listed = any(f".{saved}." in module for saved in config.modules_to_save)
    own = "modules_to_save" in slot or (listed and "base_layer" not in slot)
    return WholeTensor(name, trained[0], own=own, copies=tuple(trained[1:]), untrained=untrained)


def _no_weights_error(folder: Path) -> ModelMergeError:
    pickle = (folder / ADAPTER_PICKLE).is_file()
    what = f"only a pickle ({ADAPTER_PICKLE}), which can run code when it is loaded" if pickle else "no weights"
    return ModelMergeError(
        f"the adapter has {what}",
        reason="UNSAFE_PICKLE" if pickle else "CHECKPOINT_INCOMPLETE",
        remedy="save it as safetensors where you trust it: model.save_pretrained(…)",
        about={"file": folder / (ADAPTER_PICKLE if pickle else ADAPTER_WEIGHTS)},
    )
