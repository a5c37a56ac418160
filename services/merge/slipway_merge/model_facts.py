"""What only the model's own code knows, asked of transformers without loading a weight (the model is built on ``meta``).

Needed when an adapter touches weights that may be tied, when a square weight may be a transposed ``Conv1D``, when the
vocabulary was resized, and for the forms that peft merges. Plain LoRA on linear layers needs none of it, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slipway.errors import ModelMergeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model class with a given configuration, under the model's own names.

    Attributes:
        tied: Parameter → the parameter whose storage it shares.
        transposed: Weights stored as (in, out): those of transformers' ``Conv1D``.
        shapes: Shape of every parameter.
        model: The model itself, all of it on ``meta``.
    """

    tied: Mapping[str, str]
    transposed: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]
    model: PreTrainedModel = field(repr=False, compare=False)

    def groups(self) -> list[list[str]]:
        """Names that share one storage, each group sorted with the source first."""
        groups: dict[str, list[str]] = {}
        for target, source in sorted(self.tied.items()):
            groups.setdefault(source, [source]).append(target)
        return [groups[source] for source in sorted(groups)]


def model_facts(folder: Path, *, why: str) -> ModelFacts:
    """Facts about the model in a folder. Only its ``config.json`` is read.

    Args:
        folder: Folder of the model.
        why: What the facts are needed for; part of the error.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` when transformers cannot build this model (unknown or custom code).
    """
    import torch
    import transformers
    from transformers.pytorch_utils import Conv1D

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        cls = getattr(transformers, (config.architectures or ["PreTrainedModel"])[0])
        with torch.device("meta"):
            model = cls._from_config(config)
    except Exception as error:
        raise ModelMergeError(
            f"cannot tell {why}, because transformers cannot build the base model: {error}",
            reason="ADAPTER_UNSUPPORTED",
            remedy="use a base model that transformers knows without custom code, or merge with peft first",
            about={"file": folder / "config.json"},
        ) from error
    named = list(model.named_parameters(remove_duplicate=False))
    conv1d = [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Conv1D)]
    return ModelFacts(
        tied=dict(model.all_tied_weights_keys),
        transposed=frozenset(conv1d),
        shapes={path: tuple(parameter.shape) for path, parameter in named},
        model=model,
    )
