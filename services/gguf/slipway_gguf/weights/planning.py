"""Plan the file of a model's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipway.errors import GGUFExportError
from slipway.model.configuration import ModelConfig
from slipway.model.safetensors_file import read_weights
from slipway_gguf.architectures.parameters import Parameters, parameters_of
from slipway_gguf.architectures.table import architecture_of, refusal_reason
from slipway_gguf.weights.tensors import Planned, is_tied, plan_tensors


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """What a model's file holds.

    Attributes:
        parameters: The model's numbers.
        tied: Whether the embedding is the head too.
        tensors: The tensors.
    """

    parameters: Parameters
    tied: bool
    tensors: list[Planned]


def plan_file(model: Path) -> PlannedFile:
    """Plan the file of a model from its configuration and the headers of its weights.

    Raises:
        GGUFExportError: ``FAMILY_UNSUPPORTED``, ``BASE_MODEL_INVALID``, ``GGUF_INVALID`` or ``DTYPE_UNSUPPORTED``.
        CheckpointValidationError: A file cannot be read.
    """
    config = ModelConfig.read(model)
    found = architecture_of(config)
    if found is None or refusal_reason(config):
        raise GGUFExportError(
            refusal_reason(config),
            reason="FAMILY_UNSUPPORTED",
            remedy="use another format for this model",
            about={"model_type": str(config.get("model_type", ""))[:100]},
        )
    parameters, weights = parameters_of(found, config), read_weights(model)
    tied = is_tied(parameters, weights)
    return PlannedFile(parameters, tied, plan_tensors(weights, parameters, tied=tied))
