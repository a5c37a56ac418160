"""Facts from the model's own code: names, shapes, ties, and the weights that ``load_in_4bit`` quantizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipway.model.configuration import ModelConfig
from slipway.model.families import FEATURE_EXTRACTION, class_name
from slipway.model.model_facts import CannotBuildError, ModelFacts, model_facts_of, remedy_of
from slipway_prepare.faults import invalid_error


@dataclass(frozen=True, slots=True)
class Structure:
    """Facts about a model class with a given configuration, under the model's own names.

    Attributes:
        prefix: Name of the backbone inside the model; stored names may have or lack it.
        shapes: Shape of every parameter.
        tied: Parameter → the parameter whose storage it shares.
        transposed: Weights stored as (in, out): those of transformers' ``Conv1D``.
        nf4: Weights that transformers and bitsandbytes quantize when the model is loaded with ``load_in_4bit``.
        optional: Parameters that the class computes when they are not stored (sinusoidal positions).
        rename: Returns the name that transformers' loading gives to a stored name; fused tensors get the name of the whole.
    """

    prefix: str
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    transposed: frozenset[str]
    nf4: frozenset[str]
    optional: frozenset[str]
    rename: Callable[[str], str]

    def own_name(self, stored: str) -> str:
        """Return the model's name for a stored tensor, as transformers finds it: renamed, with or without the backbone's prefix."""
        name = self.rename(stored)
        candidates = (name, f"{self.prefix}.{name}", name.removeprefix(f"{self.prefix}."))
        return next((candidate for candidate in candidates if candidate in self.shapes), stored)

    def missing_parameters(self, stored: Collection[str]) -> list[str]:
        """Return the parameters that no stored tensor provides, sorted."""
        given = {self.own_name(name) for name in stored}
        groups = {name: self.tied.get(name, name) for name in self.shapes}
        provided = {groups[name] for name in given if name in groups}
        return sorted(name for name in self.shapes if groups[name] not in provided and name not in self.optional)


def structure(folder: Path, config: ModelConfig) -> Structure:
    """Return facts about the model in a folder with this configuration.

    ``load_in_4bit`` quantizes ``nn.Linear`` and ``Conv1D`` except the output embedding, tied weights, the last module and
    modules kept in 32 bit. transformers' own functions choose them here. Source: transformers 5, ``quantizer_bnb_4bit.py`` and
    ``integrations/bitsandbytes.py``.

    Raises:
        CheckpointValidationError: ``BASE_MODEL_INVALID`` when transformers cannot build this model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    try:
        facts = _facts(config)
    except CannotBuildError as error:
        raise invalid_error(
            f"cannot be built by transformers: {error}",
            remedy=remedy_of(config),
            file=folder / "config.json",
        ) from error
    model = facts.model
    skipped = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or [])]
    linears = [
        path for path, module in model.named_modules() if type(module) is torch.nn.Linear or isinstance(module, Conv1D)
    ]
    ignored = [*(model._keys_to_ignore_on_load_missing or []), *(model._keys_to_ignore_on_save or [])]
    return Structure(
        prefix=model.base_model_prefix,
        shapes=facts.shapes,
        tied=facts.tied,
        transposed=facts.transposed,
        nf4=frozenset(f"{path}.weight" for path in linears if should_convert_module(path, skipped)),
        optional=frozenset(name for name in facts.shapes if any(re.search(key, name) for key in ignored)),
        rename=_make_rename(get_model_conversion_mapping(model)),
    )


def _facts(config: ModelConfig) -> ModelFacts:
    """Return facts about the class that a configuration names; where it names none (DeBERTa's on the hub), about the bare model."""
    bare = None if config.get("architectures") else class_name(FEATURE_EXTRACTION, config)
    return model_facts_of({**config, "architectures": [bare]} if bare else config)


def _make_rename(transforms: Sequence[Any]) -> Callable[[str], str]:
    """Return a function that applies transformers' renamings to a stored name; fused tensors get the name of the whole."""

    def rename(name: str) -> str:
        for transform in transforms:
            name = transform.rename_source_key(name)[0]
        return name

    return rename
