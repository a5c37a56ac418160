"""Ask the model's own code about facts that the merge needs.

They are needed if an adapter changes weights that may be tied, if a square weight may be a transposed ``Conv1D``, if the vocabulary
was resized, and for the forms that peft merges. Plain LoRA on linear layers does not need them and imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from slipway.errors import ModelMergeError
from slipway.model.configuration import ModelConfig
from slipway.model.model_facts import CannotBuildError, ModelFacts, model_facts, model_facts_of, remedy_of


def facts_for(model: Path | ModelConfig, *, why: str) -> ModelFacts:
    """Return facts about a model.

    Args:
        model: Its folder, or the content of its ``config.json``.
        why: The purpose; part of the error.

    Raises:
        ModelMergeError: ``ADAPTER_UNSUPPORTED`` if transformers cannot build this model.
    """
    try:
        return model_facts(model) if isinstance(model, Path) else model_facts_of(model)
    except CannotBuildError as error:
        raise ModelMergeError(
            f"cannot tell {why}, because transformers cannot build the base model: {error}",
            reason="ADAPTER_UNSUPPORTED",
            remedy=remedy_of(ModelConfig.read(model) if isinstance(model, Path) else model),
            about={"file": model / "config.json"} if isinstance(model, Path) else {},
        ) from error
