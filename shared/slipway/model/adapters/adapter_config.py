"""``adapter_config.json``: options that Slipway handles itself, leaves to peft, or refuses; and refusals of adapters.

Adapters that cannot be merged are refused: for unsupported options, another base model, or missing weights.

Field names and meanings: peft 0.21, ``peft/tuners/lora/config.py``. An adapter with a set field that is not listed here is merged
by peft, if peft knows the field: an option of a newer peft is never silently ignored.

peft matches every key of ``rank_pattern`` and ``alpha_pattern`` against every module (``get_pattern_key``). An adapter of
experts has tens of thousands of both, and nearly all keys are plain names, which are looked up here with the same result.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from slipway.errors import ModelMergeError
from slipway.model.module_patterns import check_patterns
from slipway.texts import quoted

_SPECIAL = frozenset("*+?{}()[]|^$\\")

#: Fields about training; the merged weights do not depend on them.
_NEUTRAL = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode",
        "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "task_type",
    }
)  # fmt: skip
_USED = frozenset(
    {
        "alpha_pattern", "bias", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out", "init_lora_weights",
        "layer_replication", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "modules_to_save", "r",
        "rank_pattern", "target_modules", "target_parameters", "trainable_token_indices", "use_rslora",
    }
)  # fmt: skip
#: Initialisations that leave the base weights as they are, so that base + scaling · B·A is the trained model.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "mica", "orthogonal")
#: Initialisations whose change of the base weights depends on these alone, so that peft can repeat it.
REPEATED_INITS = ("pissa", "olora")
#: Names of embeddings that peft keeps tied (``EMBEDDING_LAYER_NAMES``).
_EMBEDDINGS = ("embed_tokens", "lm_head")

PEFT_REMEDY = "merge it with peft (merge_and_unload) and export the result as a base model"
#: Remedy for an adapter that cannot be merged at all.
UNMERGED_REMEDY = "serve the base model with the adapter beside it, through peft"


class PatternKeys:
    """Keys in the order in which peft tries them.

    In a plain name a dot matches any character, as in every expression. So plain names are indexed by length and positions of their
    dots, and a module is looked up with dots at these positions.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = tuple(keys)
        self._expressions: list[int] = []
        self._plain: dict[int, dict[tuple[int, ...], dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
        for place, key in enumerate(self._keys):
            if _SPECIAL.isdisjoint(key):
                dots = tuple(index for index, character in enumerate(key) if character == ".")
                self._plain[len(key)][dots][key] = place
            else:
                self._expressions.append(place)

    def first(self, module: str) -> str:
        """Return the first key that matches a module; the module's name if none does."""
        return next(self.matching(module), module)

    def matching(self, module: str) -> Iterator[str]:
        """Yield the keys that match a module, in their order."""
        if not self._keys:
            return
        if "\n" in module:  # a dot and the end of an expression treat it specially
            yield from (key for key in self._keys if _expression(key).match(module))
            return
        plain = sorted(self._plain_places(module))
        for place in heapq.merge(plain, self._expressions):
            key = self._keys[place]
            if _SPECIAL.isdisjoint(key) or _expression(key).match(module):
                yield key

    def _plain_places(self, module: str) -> Iterator[int]:
        starts = [0, *(index + 1 for index, character in enumerate(module) if character == ".")]
        for end in (module[start:] for start in starts):
            for dots, places in self._plain.get(len(end), {}).items():
                characters = list(end)
                for dot in dots:
                    characters[dot] = "."
                place = places.get("".join(characters))
                if place is not None:
                    yield place


@cache
def _expression(key: str) -> re.Pattern[str]:
    """Return a key as peft's expression; cached, because an adapter may have more keys than :mod:`re` caches."""
    return re.compile(rf"(.*\.)?({key})$")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Options that decide the merged weights. Patterns map regular expressions of module names to ranks and alphas.

    With ``through_peft`` peft merges every module by ``raw``, and ranks and scalings here are unused. ``parameters`` are weights with
    their own pairs, such as stacks of experts; ``replication`` lists ranges of base layers; ``tokens`` are the embedding rows that
    the adapter replaces.
    """

    rank: int
    alpha: float
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    fan_in_fan_out: bool = False
    modules_to_save: tuple[str, ...] = ()
    ensure_weight_tying: bool = False
    target_modules: frozenset[str] | str = frozenset()
    selective: bool = False
    through_peft: bool = False
    bias: str = "none"
    parameters: tuple[str, ...] = ()
    replication: tuple[tuple[int, int], ...] = ()
    tokens: tuple[int, ...] | Mapping[str, tuple[int, ...]] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)
    _ranks: PatternKeys = field(init=False, repr=False, compare=False)
    _alphas: PatternKeys = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare the patterns for fast lookup."""
        object.__setattr__(self, "_ranks", PatternKeys(self.rank_pattern))
        object.__setattr__(self, "_alphas", PatternKeys(self.alpha_pattern))

    @property
    def has_form(self) -> bool:
        """Whether the adapter must have tensors for peft to merge (one with only embedding rows has none)."""
        return self.through_peft and self.raw.get("peft_type") != "TRAINABLE_TOKENS"

    @property
    def ties_embeddings(self) -> bool:
        """Whether peft trained tied weights as one: if requested, and an embedding has a name that peft knows."""
        names = [*self.modules_to_save, *(() if isinstance(self.target_modules, str) else self.target_modules)]
        return self.ensure_weight_tying and (
            any(name.rpartition(".")[2] in _EMBEDDINGS for name in names) or any(map(self.names, _EMBEDDINGS))
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of a module by the first matching pattern (peft's ``get_pattern_key``)."""
        return self.rank_pattern.get(self._ranks.first(module), self.rank)

    def scaling_of(self, module: str) -> float:
        """Return the factor of ``B @ A``: alpha / r, or alpha / √r with rank-stabilised LoRA (arXiv 2312.03732, eq. 4)."""
        alpha = self.alpha_pattern.get(self._alphas.first(module), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def matching_alphas(self, module: str) -> list[float]:
        """Return the different alphas whose patterns match a module, in saved order."""
        return list(dict.fromkeys(self.alpha_pattern[key] for key in self._alphas.matching(module)))

    def targets(self, module: str) -> bool:
        """Return whether the configuration targets this module; False if only the model can tell."""
        return not self.selective and self.names(module)

    def names(self, module: str) -> bool:
        """Return whether this module is among the named ones, though other options may exclude it."""
        if isinstance(self.target_modules, str):
            return self.target_modules != "all-linear" and re.fullmatch(self.target_modules, module) is not None
        parts = module.split(".")
        return any(".".join(parts[start:]) in self.target_modules for start in range(len(parts)))


def parse_adapter_config(raw: Mapping[str, Any], modules: Iterable[str] = ()) -> AdapterConfig:
    """Check and return the configuration of an adapter.

    Args:
        raw: ``adapter_config.json``.
        modules: Names that its patterns will be matched against.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` naming the option that cannot be merged;
            ``ADAPTER_CONFIG_INVALID`` naming the field whose value is impossible.
        CheckpointValidationError: ``ADAPTER_CONFIG_INVALID`` for a pattern that takes too long to match.
    """
    check_patterns(raw, modules)
    target = raw.get("target_modules")
    shared = AdapterConfig(
        rank=8,
        alpha=8,
        modules_to_save=_names(raw, "modules_to_save"),
        ensure_weight_tying=_flag(raw, "ensure_weight_tying"),
        target_modules=target if isinstance(target, str) else frozenset(_names(raw, "target_modules")),
        selective=any(raw.get(key) not in (None, [], "") for key in ("layers_to_transform", "exclude_modules")),
        through_peft=_is_for_peft(raw),
        bias=str(raw.get("bias") or "none"),
        parameters=_names(raw, "target_parameters"),
        replication=_ranges(raw, "layer_replication"),
        tokens=_tokens(raw),
        raw=raw,
    )
    if raw.get("peft_type") != "LORA":
        return shared
    return replace(
        shared,
        rank=int(_check_number("r", raw.get("r", 8), integer=True)),
        alpha=_check_number("lora_alpha", raw.get("lora_alpha", 8), integer=False),
        rslora=_flag(raw, "use_rslora"),
        rank_pattern={key: int(value) for key, value in _patterns(raw, "rank_pattern", integer=True).items()},
        alpha_pattern=_patterns(raw, "alpha_pattern", integer=False),
        fan_in_fan_out=_flag(raw, "fan_in_fan_out"),
    )


def _is_for_peft(raw: Mapping[str, Any]) -> bool:
    """Return whether peft must merge this adapter: it is not LoRA, or a LoRA option makes it more than a product."""
    if raw.get("peft_type") != "LORA":
        return True
    init = raw.get("init_lora_weights", True)
    known = init.lower() if isinstance(init, str) else init  # peft takes "OLoRA" and "MiCA" too
    repeated = known in REPEATED_INITS
    if not repeated and not (isinstance(known, bool | str | None) and known in _PLAIN_INITS):
        raise unsupported(
            "init_lora_weights",
            init,
            "it changes the base weights when training starts, and the change is not in the checkpoint",
            remedy="in the training process, which still has them, save the adapter with path_initial_model_for_weight_"
            "conversion, or merge it (merge_and_unload) and export the result as a base model; peft cannot do it later",
        )
    # An empty map means defaults to peft, and turns the variant on.
    more = ["init_lora_weights"] if repeated else []
    more += [key for key in sorted(set(raw) - _NEUTRAL - _USED) if raw[key] or raw[key] == {}]
    more += ["target_parameters"] if raw.get("target_parameters") and raw.get("layer_replication") else []
    if more and raw.get("layer_replication"):
        raise unsupported("layer_replication", raw["layer_replication"], f"it cannot be merged together with {more[0]}")
    return bool(more)


def _invalid_error(key: str, value: object, expected: str) -> ModelMergeError:
    return ModelMergeError(
        f"the adapter's {key} is {quoted(value)}, expected {expected}",
        reason="ADAPTER_CONFIG_INVALID",
        remedy="copy adapter_config.json from the training run again",
        about={"key": key},
    )


def _check_number(key: str, value: object, *, integer: bool) -> float:
    expected = "a whole number of at least 1" if integer else "a finite number"
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float):
        raise _invalid_error(key, value, expected)
    if not math.isfinite(value) or (integer and value < 1):
        raise _invalid_error(key, value, expected)
    return value


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise _invalid_error(key, value, "true or false")
    return bool(value)


def _names(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _invalid_error(key, value, "a list of module names")
    return tuple(sorted(value))


def _ranges(raw: Mapping[str, Any], key: str) -> tuple[tuple[int, int], ...]:
    value = raw.get(key) or []
    pairs = [tuple(entry) if isinstance(entry, list) else () for entry in value] if isinstance(value, list) else [()]
    if not all(len(pair) == 2 and all(type(end) is int for end in pair) and 0 <= pair[0] < pair[1] for pair in pairs):
        raise _invalid_error(key, value, "a list of [first, end) pairs of layer numbers")
    return tuple((first, end) for first, end in pairs)


def _tokens(raw: Mapping[str, Any]) -> tuple[int, ...] | Mapping[str, tuple[int, ...]]:
    """Return the rows that ``trainable_token_indices`` (or ``token_indices`` of a token adapter) replaces."""
    key = "token_indices" if raw.get("peft_type") == "TRAINABLE_TOKENS" else "trainable_token_indices"
    value = raw.get(key) or []
    parts = value if isinstance(value, dict) else {"": value}
    for rows in parts.values():
        if not isinstance(rows, list) or not all(type(row) is int and row >= 0 for row in rows):
            raise _invalid_error(key, value, "token ids, or a map from module names to them")
        if len(set(rows)) != len(rows):
            raise _invalid_error(key, value, "every token id once")
    return {name: tuple(rows) for name, rows in parts.items()} if isinstance(value, dict) else tuple(value)


def _patterns(raw: Mapping[str, Any], key: str, *, integer: bool) -> dict[str, float]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise _invalid_error(key, value, "a map from module patterns to numbers")
    return {pattern: _check_number(f"{key}[{pattern!r}]", entry, integer=integer) for pattern, entry in value.items()}


def unsupported(key: str, value: object, why: str, *, remedy: str = PEFT_REMEDY) -> ModelMergeError:
    """Return the refusal of an option, with its name and value."""
    return ModelMergeError(
        f"the adapter's {key} is {quoted(value)}: {why}",
        reason="ADAPTER_UNSUPPORTED",
        remedy=remedy,
        about={"key": key, "value": quoted(value)},
    )


def misfit(message: str, *, reason: str = "ADAPTER_BASE_MISMATCH", **about: object) -> ModelMergeError:
    """Return the refusal of an adapter that was trained on another base model."""
    return ModelMergeError(
        message,
        reason=reason,
        remedy="the adapter was trained on another base model or with other settings: use the one that its "
        "adapter_config.json names",
        about=about,
    )


def incomplete(message: str, **about: object) -> ModelMergeError:
    """Return the refusal of a checkpoint that lacks weights which its configuration names."""
    return ModelMergeError(
        message,
        reason="CHECKPOINT_INCOMPLETE",
        remedy="copy the checkpoint again: some of its weights are missing",
        about=about,
    )
