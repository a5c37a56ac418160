"""Choose formats and levels for a model and a target, and write the choice as YAML.

The choice follows from what the installed formats say about the target. A model is described by its family, its size and the size
of its cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slipway.configuration import ExportConfiguration
from slipway.errors import ConfigurationError
from slipway.formats.contract import Format
from slipway.formats.registry import formats, translate_format_errors
from slipway.formats.settings import FormatSettings
from slipway.formats.targets import ALIASES, TARGETS, Fit, target_name
from slipway.formats.tasks import FormatRequest
from slipway.model.configuration import ModelConfig
from slipway.model.model_files import resolve_base_model
from slipway.planning.preflight import model_size
from slipway.settings.problems import near_names
from slipway.sizes import ModelSize, format_size

CONTEXT = 4096
"""Context length for which the cache is estimated, in tokens; the model's own limit if that is lower."""
_CACHE_VALUE_BYTES = 2
_MOST = 1 << 20
"""Larger numbers of a configuration are not believed."""

_RUNTIME_BYTES = 200 << 20
"""Memory of a runtime beside weights and cache."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that a recommendation is for.

    Attributes:
        folder: Its folder.
        family: Name of its family; empty if none fits.
        size: Its size.
        cache_bytes: Keys and values of :data:`CONTEXT` tokens in 16 bits; 0 for a model without a cache.
        config: Its ``config.json``.
    """

    folder: Path
    family: str
    size: ModelSize
    cache_bytes: int
    config: ModelConfig = field(default_factory=lambda: ModelConfig({}))

    @classmethod
    def read(cls, name: str, *, config: ModelConfig | None = None) -> Subject:
        """Read a model by the headers of its files.

        Args:
            name: Its folder, or its id in the local cache.
            config: Its configuration, if it is not that in the folder: a fine-tune may bring a head of another kind.

        Raises:
            CheckpointValidationError: It is no model folder.
        """
        folder = resolve_base_model(name)
        config = ModelConfig.read(folder) if config is None else config
        family = config.family
        cached = family is not None and family.generates
        return cls(
            folder, family.name if family else "", model_size(folder), _cache_bytes(config) if cached else 0, config
        )


def _cache_bytes(model: ModelConfig) -> int:
    config = {**model, **model.text}
    layers = _number(config, "num_hidden_layers", "n_layer", "decoder_layers", "num_layers")
    heads = _number(config, "num_attention_heads", "n_head", "decoder_attention_heads", "num_heads")
    kept = _number(config, "num_key_value_heads") or heads
    width = _number(config, "hidden_size", "n_embd", "d_model")
    each = _number(config, "head_dim") or (width // heads if heads else 0)
    context = min(CONTEXT, _number(config, "max_position_embeddings", "n_positions") or CONTEXT)
    return 2 * layers * kept * each * context * _CACHE_VALUE_BYTES


def _number(config: Mapping[str, Any], *names: str) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and 0 < value <= _MOST), 0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An output that runs on the target.

    Attributes:
        format: Its format.
        level: Its level; empty: unquantized.
        why: Why the format fits.
        source: Where that comes from.
        settings: Further settings that the target needs.
        size_bytes: Estimated size, from above; None without a model.
        memory_bytes: Estimated memory while it runs: weights, cache and runtime.
        unfit: Why it cannot be taken here; empty if it can.
        variant: The variant that it is instead of a level; empty for none.
    """

    format: str
    level: str
    why: str
    source: str
    settings: Mapping[str, Any]
    size_bytes: int | None = None
    memory_bytes: int | None = None
    unfit: str = ""
    variant: str = ""

    @property
    def output(self) -> str:
        """Return the name of its folder."""
        kind = self.variant or self.level
        return f"{self.format}-{kind}" if kind else self.format


def recommend(
    target: str, *, subject: Subject | None = None, memory: int | None = None, family: str = ""
) -> tuple[Candidate, ...]:
    """Return the outputs that run on a target, the best first; those that do not fit come last.

    Formats are in the order of their ranks, and the levels of each in the order that it names: the usual one first.

    Args:
        target: One of :data:`slipway.formats.targets.TARGETS`, or another name of one, in any case.
        subject: The model; None for a recommendation without sizes.
        memory: Bytes of memory on the target.
        family: Family of a model that is not known otherwise; empty for any.

    Raises:
        ConfigurationError: ``TARGET_UNKNOWN``; ``TARGET_UNFIT``: nothing installed fits.
    """
    target = target_name(target)
    if target not in TARGETS:
        raise ConfigurationError(
            f"{target!r} is no known target",
            reason="TARGET_UNKNOWN",
            remedy=near_names(target, (*TARGETS, *ALIASES)),
        )
    family = subject.family if subject else family
    fits = [(fit, each) for each in formats().values() for fit in each.fits if fit.target == target]
    about = [(fit, each) for fit, each in fits if fit.takes(family) and _takes(each, family)]
    about.sort(key=lambda pair: (pair[0].rank, pair[1].rank))
    chosen: list[Candidate] = []
    for fit, each in about:
        known = {one.output for one in chosen}
        chosen += [one for one in _candidates(fit, each, subject, memory) if one.output not in known]
    if not any(not one.unfit for one in chosen):
        raise ConfigurationError(*_unfit_message(target, family, chosen), reason="TARGET_UNFIT", remedy=_remedy(chosen))
    return tuple(sorted(chosen, key=lambda one: bool(one.unfit)))


def _takes(each: Format[Any], family: str) -> bool:
    families = each.runtime.families if each.runtime else None
    return not family or families is None or family in families


def _candidates(fit: Fit, each: Format[Any], subject: Subject | None, memory: int | None) -> Iterable[Candidate]:
    for level in fit.levels:
        size = needed = None
        unfit = ""
        if subject is not None and each.output_bytes is not None:
            with translate_format_errors(each):
                size = int(each.output_bytes(each.settings(), level, subject.size))
            needed = size + subject.cache_bytes + _RUNTIME_BYTES
            if memory is not None and needed > memory:
                unfit = f"needs about {format_size(needed)}, and there is {format_size(memory)}"
        if subject is not None and subject.config:
            with translate_format_errors(each):
                section = each.settings(**fit.settings)
            unfit = find_refusal(each, section, level, subject.config) or unfit
        yield Candidate(each.name, level, fit.why, fit.source, fit.settings, size, needed, unfit, fit.variant)


def find_refusal(each: Format[Any], section: FormatSettings, level: str, config: ModelConfig) -> str:
    """Return why a stage that an output needs refuses a model; empty if none does.

    Args:
        each: The output's format.
        section: Settings of the format.
        level: The output's level; empty for the unquantized one.
        config: The model's ``config.json``.

    Raises:
        ConfigurationError: ``FORMAT_INVALID``: the format fails.
    """
    with translate_format_errors(each):
        tasks = each.plan(
            FormatRequest(each.name, section, (level,) if level else (), "model", base="base", adapter="adapter")
        )
    calls = (known for task in tasks if (known := task.known()))
    return next((why for stage, params in calls if (why := stage.forecast.refuses(params, config))), "")


def _unfit_message(target: str, family: str, candidates: list[Candidate]) -> tuple[str]:
    if candidates and all(one.memory_bytes is None or "needs about" not in one.unfit for one in candidates):
        return (f"nothing fits {target}: {candidates[0].output}: {candidates[0].unfit}",)
    if candidates:
        smallest = min(candidates, key=lambda one: one.memory_bytes or 0)
        return (f"nothing fits {target}: the smallest output, {smallest.output}, {smallest.unfit}",)
    what = f" for a model of the family {family}" if family else ""
    return (f"no installed format runs on {target}{what}",)


def _remedy(candidates: list[Candidate]) -> str:
    return (
        "give more memory, or take a smaller model"
        if candidates
        else "install the extras of more formats, or choose another target"
    )


def sections_for(candidate: Candidate) -> dict[str, dict[str, Any]]:
    """Return format sections that make only this candidate; other formats that are enabled by default are switched off."""
    section: dict[str, Any] = {"enabled": True}
    if candidate.level:
        section |= {"unquantized": False, "quantization": [candidate.level]}
    section |= candidate.settings
    defaults = [each.name for each, _ in ExportConfiguration().formats.enabled()]
    off: dict[str, dict[str, Any]] = {name: {"enabled": False} for name in defaults if name != candidate.format}
    return {**off, candidate.format: section}


def settings_for(candidate: Candidate, target: str, *, model: str = "") -> str:
    """Return a configuration as YAML that makes a candidate and nothing else."""
    document: dict[str, Any] = {"base_model": {"name": model}} if model else {}
    document |= {"formats": sections_for(candidate), "output": {"target": target}}
    return yaml.safe_dump({"export": document}, sort_keys=False, default_flow_style=None, width=1 << 20)
